"""``recipes/serve_check.py`` itself, without an engine: what counts as equal, and what a dead engine says."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(RECIPES))
    try:
        import serve_check

        yield serve_check
    finally:
        sys.path.remove(str(RECIPES))


def reference(gap: float) -> SimpleNamespace:
    return SimpleNamespace(tokens=[[1] * 32, [2] * 32], gap=lambda row, at, token: gap)


def test_equal_tokens(script: ModuleType) -> None:
    found = script.compare(reference(9.0), [[1] * 32, [2] * 32])
    assert (found["verdict"], found["tokens_equal"], found["ties"]) == ("equal", "64 of 64", 0)


def test_a_difference_is_wrong(script: ModuleType) -> None:
    found = script.compare(reference(0.002), [[1] * 32, [2] * 31 + [3]])
    assert (found["verdict"], found["prompts_equal"], found["tokens_equal"]) == ("wrong", "1 of 2", "63 of 64")
    assert found["differences"] == [{"prompt": 1, "token": 31, "logits_apart": 0.002}]


def test_a_difference_between_tied_logits_is_equal(script: ModuleType) -> None:
    found = script.compare(reference(0.0009), [[1] * 32, [2] * 4 + [3] * 28])
    assert (found["verdict"], found["tokens_equal"], found["ties"]) == ("equal", "36 of 64", 1)


def test_a_dead_engine_is_a_refusal_with_its_message(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = tmp_path / "serve" / "dead.py"
    dead.parent.mkdir()
    dead.write_text("import os, sys\nprint('x.cpp: ASSERT(a < b) failed\\nlast line', file=sys.stderr)\nos.abort()\n")
    monkeypatch.setattr(script, "__file__", str(tmp_path / "serve_check.py"))
    monkeypatch.setitem(script.SCRIPTS, "mlx", "dead.py")
    assert script.ask("mlx", sys.executable, {}, 60) == {"error": "x.cpp: ASSERT(a < b) failed"}


def test_rows_replace_those_of_the_same_run(script: ModuleType, tmp_path: Path) -> None:
    row = {"engine": "mlx", "checkpoint": "a", "layout": None, "dtype": "float32", "options": {}}
    script.merge(tmp_path / "rows.json", [row | {"verdict": "wrong"}])
    script.merge(tmp_path / "rows.json", [row | {"verdict": "equal"}, row | {"engine": "vllm"}])
    assert [found.get("verdict") for found in json.loads((tmp_path / "rows.json").read_text())["rows"]] == [
        "equal",
        None,
    ]
