"""``recipes/serve_check.py`` itself, without an engine: what counts as equal, and what a dead
engine says.
"""

import importlib
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
