"""Stages on stderr: lines where it is no terminal of a known size, one bar where it is."""

import io
import os
import re
import sys

import pytest

from kvfold.convert import progress


@pytest.fixture
def told(monkeypatch, capsys):
    """The lines on stderr, which is no terminal: one for every step, without the time of day."""
    monkeypatch.setattr(progress, "EVERY", 0.0)
    lines = []

    def read():
        lines.extend(re.sub(r"^\[\d\d:\d\d:\d\d\] ", "", line) for line in capsys.readouterr().err.splitlines())
        return lines

    return read


def test_a_line_names_the_innermost_stage_and_those_around_it(told):
    with (
        progress.stage("reading"),
        progress.stage("writing", 10**9, "B") as wrote,
        progress.stage("fitting", 32, "layer", 5) as fitted,
    ):
        wrote(10**6)
        fitted(1)
        with progress.stage("refining", 150, "step") as refined:
            refined(1)
        assert told()[-2:] == ["fitting layer 7 of 32, refining step 2 of 150", "fitting layer 7 of 32"]
    with progress.stage("writing", 10**9, "B", 10**6):
        assert told()[-1] == "writing: 1.0 MB of 1.0 GB"


def test_time_left_is_told_after_two_steps(told):
    with progress.stage("fitting", 8, "layer", 3) as fitted:
        fitted(1)
        assert told()[-1] == "fitting layer 5 of 8"
        fitted(1)
        assert re.fullmatch(r"fitting layer 6 of 8 \(00:00 left\)", told()[-1])


def test_a_short_run_prints_no_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_told", progress.time.time())
    with pytest.raises(KeyboardInterrupt), progress.stage("fitting", 4, "layer"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""
    assert not progress._open


def test_a_terminal_has_one_bar(monkeypatch):
    monkeypatch.setattr(progress, "_has_width", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with progress.stage("fitting", 4, "layer") as fitted:
        fitted(1)
        with progress.stage("refining", 10, "step"):
            pass
    assert "\n" not in stream.getvalue()  # a second bar would be on a line of its own
    assert re.search(r"\rfitting layer 2 of 4, refining: +0%.*\rfitting: +25%", stream.getvalue())


def test_a_terminal_of_unknown_size_has_lines(monkeypatch):
    master, slave = os.openpty()  # 0 columns
    with os.fdopen(slave, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert stderr.isatty()
        assert not progress._has_width()
    os.close(master)


def test_steps_go_to_the_caller_where_there_is_one(told):
    steps = []
    stages = progress.Stages(lambda *step: steps.append(step))
    with stages("reading"), stages("write", 10, "B", 4) as wrote:
        wrote(6)
        assert list(stages.over("convert", "ab", 2, "layer")) == ["a", "b"]
    assert steps == [("write", 4, 10), ("write", 10, 10), *(("convert", done, 2) for done in range(3))]
    with progress.Stages(quiet=True)("reading"):
        pass
    assert told() == []
