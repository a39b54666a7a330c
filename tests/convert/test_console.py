"""Estimates of the time left, and byte counts."""

import re

import pytest

from kvfold.convert import ConvertRequest, console, convert_checkpoint
from kvfold.convert.data import demo_folder

TARGETS = {"gqa": {"to": "gqa", "kv_heads": 4}, "mla": {"to": "mla", "kv_rank": 16, "rope_dim": 16}}


def told(monkeypatch, capsys, moments, left, quiet=False):
    clock = iter(moments)
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    pace = console.Pace(left, quiet)
    for _ in moments:
        pace.layer_done()
    return capsys.readouterr().err


def test_the_rest_takes_as_long_as_the_second_layer(monkeypatch, capsys):
    said = told(monkeypatch, capsys, [100.0, 130.0, 131.0], left=16)
    assert said == "30 s per layer; about 7 min for the remaining 14\n"


@pytest.mark.parametrize(("moments", "quiet"), [([100.0, 130.0], True), ([100.0, 100.5], False), ([100.0], False)])
def test_little_is_not_worth_a_line(monkeypatch, capsys, moments, quiet):
    assert told(monkeypatch, capsys, moments, left=16, quiet=quiet) == ""


@pytest.mark.parametrize("refine", [0, 2])
def test_all_targets_announce_themselves_alike(tmp_path, capsys, monkeypatch, refine):
    monkeypatch.setattr(console, "_WORTH_TELLING", 0)
    text = tmp_path / "few.txt"
    text.write_text("def function(argument): return a value of the list. " * 60)
    said = []
    for name, options in TARGETS.items():
        options = {**options, "calibration": str(text), "samples": 1, "seq_len": 8, "refine": refine}
        convert_checkpoint(ConvertRequest(model=str(demo_folder()), out=str(tmp_path / name), **options))
        lines = capsys.readouterr().err.splitlines()
        said.append([re.sub(r"[\d.]+|mean|svd", "_", line) for line in lines if not line.startswith("refined")])
    besides = " and refining (--refine _)" if refine else ""
    assert (
        said[0]
        == said[1]
        == [
            f"calibrating on _ x _ tokens of few_txt; forward passes: about _ s, plus fitting{besides} of _ layers_ "
            "(--method _ needs no text and is faster, but worse_)",
            "_ s per layer; about _ s for the remaining _",
        ]
    )
