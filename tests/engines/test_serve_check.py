"""``recipes/serve_check.py`` itself, without an engine: what counts as equal, and what a dead
engine says.
"""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "recipes")
    return importlib.import_module("serve_check")


@pytest.mark.parametrize(
    ("found", "apart", "verdict", "equal", "ties"),
    [
        ([[1] * 32, [2] * 32], 9.0, "equal", "64 of 64", 0),
        ([[1] * 32, [2] * 31 + [3]], 0.002, "wrong", "63 of 64", 0),
        ([[1] * 32, [2] * 4 + [3] * 28], 0.0009, "equal", "36 of 64", 1),
    ],
)
def test_verdicts(script, found, apart, verdict, equal, ties):
    reference = SimpleNamespace(tokens=[[1] * 32, [2] * 32], gap=lambda row, at, token: apart)
    row = script.compare(reference, found)
    assert (row["verdict"], row["tokens_equal"], row["ties"]) == (verdict, equal, ties)
    if verdict == "wrong":
        assert row["prompts_equal"] == "1 of 2"
        assert row["differences"] == [{"prompt": 1, "token": 31, "logits_apart": apart}]


def test_a_dead_engine_is_a_refusal_with_its_message(script, tmp_path, monkeypatch):
    dead = tmp_path / "serve" / "dead.py"
    dead.parent.mkdir()
    dead.write_text(
        "import os, sys\nprint('x.cpp: ASSERT(a < b) failed\\nlast line',"
        " file=sys.stderr)\nos.abort()\n"
    )
    monkeypatch.setattr(script, "__file__", str(tmp_path / "serve_check.py"))
    monkeypatch.setitem(script.SCRIPTS, "mlx", "dead.py")
    assert script.ask("mlx", sys.executable, {}, 60) == {"error": "x.cpp: ASSERT(a < b) failed"}
