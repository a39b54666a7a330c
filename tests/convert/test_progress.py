"""Stages on stderr: bars on a terminal, lines where it is none, steps for a caller's function."""

import io
import re
import sys

from kvfold.convert import progress


def test_without_a_terminal_a_line_gives_the_stage_and_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    with progress.ProgressStages()("convert", 32, "layer", 5) as advance:
        advance(1)
        advance(1)
    assert re.search(r"^convert: +22%.* 7/32 \[00:00<00:0\d", capsys.readouterr().err, re.MULTILINE)


def test_a_terminal_has_bars(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.ProgressStages()("convert", 4, "layer"), progress.ProgressStages()("reading"):
        pass
    assert re.search(r"\rconvert: +0%.*\rreading", stream.getvalue(), re.DOTALL)


def test_steps_go_to_the_caller_where_there_is_one(capsys):
    steps = []
    stages = progress.ProgressStages(lambda *step: steps.append(step))
    with stages("reading"), stages("write", 10, "B", 4) as wrote:
        wrote(6)
        assert list(stages.iterate_over("convert", "ab", 2, "layer")) == ["a", "b"]
    assert steps == [
        ("write", 4, 10),
        ("write", 10, 10),
        *(("convert", done, 2) for done in range(3)),
    ]
    with progress.ProgressStages(quiet=True)("reading"):
        pass
    assert capsys.readouterr().err == ""
