"""Estimates of the time left, and byte counts."""

import re

import pytest

from kvfold.convert import ConvertRequest, console, convert_checkpoint, progress
from kvfold.convert.data import demo_folder

TARGETS = {"gqa": {"to": "gqa", "kv_heads": 4}, "mla": {"to": "mla", "kv_rank": 16, "rope_dim": 16}}


def printed(monkeypatch, capsys, moments, left, quiet=False):
    clock = iter(moments)
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    time_left = console.TimeLeft(left, quiet)
    for _ in moments:
        time_left.one_done()
    return capsys.readouterr().err


def test_the_remaining_layers_take_as_long_as_the_second(monkeypatch, capsys):
    text = printed(monkeypatch, capsys, [100.0, 130.0, 131.0], left=16)
    assert text == "30 s per layer; about 7 min for the remaining 14\n"


@pytest.mark.parametrize(("moments", "quiet"), [([100.0, 130.0], True), ([100.0, 100.5], False), ([100.0], False)])
def test_no_line_for_less_than_ten_seconds(monkeypatch, capsys, moments, quiet):
    assert printed(monkeypatch, capsys, moments, left=16, quiet=quiet) == ""


@pytest.mark.parametrize("refine", [0, 2])
def test_all_targets_announce_themselves_alike(tmp_path, capsys, monkeypatch, refine):
    monkeypatch.setattr(console, "LEAST_PRINTED", 0)
    monkeypatch.setattr(progress, "EVERY", 600)  # on a busy machine such lines come between
    text = tmp_path / "few.txt"
    text.write_text("def function(argument): return a value of the list. " * 60)
    texts = []
    for name, options in TARGETS.items():
        options = {**options, "calibration": str(text), "samples": 1, "seq_len": 8, "refine": refine}
        convert_checkpoint(ConvertRequest(model=str(demo_folder()), out=str(tmp_path / name), **options))
        lines = capsys.readouterr().err.splitlines()
        texts.append([re.sub(r"[\d.]+|mean|svd", "_", line) for line in lines if not line.startswith("refined")])
    assert (
        texts[0]
        == texts[1]
        == [
            "calibrating on _ x _ tokens of few_txt (--method _ needs no text and is faster, but worse)",
            "_ s per layer; about _ s for the remaining _",
        ]
    )
