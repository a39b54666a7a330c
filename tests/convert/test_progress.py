"""Stages on stderr: lines where it is no terminal of a known size, one bar where it is."""

import io
import os
import re
import sys
import time

import pytest

from kvfold.convert import progress


@pytest.fixture
def told(monkeypatch, capsys):
    """``told(pattern)`` waits for a line on stderr, which is no terminal; one is printed at every
    look.
    """
    for name, seconds in {"EVERY": 0.0, "LASTS": 0.0, "TICK": 0.005}.items():
        monkeypatch.setattr(progress, name, seconds)

    def wait(pattern):
        lines = []
        limit = time.monotonic() + 30
        while not any(re.fullmatch(rf"\[\d\d:\d\d:\d\d\] {pattern}", line) for line in lines):
            assert time.monotonic() < limit, lines
            time.sleep(0.005)
            lines += capsys.readouterr().err.splitlines()

    return wait


def test_a_line_names_the_innermost_stage_and_those_around_it(told):
    with (
        progress.Stages()("writing", 10**9, "B") as wrote,
        progress.Stages()("fitting", 32, "layer", 5) as fitted,
    ):
        wrote(10**6)
        fitted(1)
        with progress.Stages()("refining", 150, "step") as refined:
            refined(1)
            told("fitting layer 7 of 32, refining step 2 of 150")
        told("fitting layer 7 of 32")
    with progress.Stages()("writing", 10**9, "B", 10**6):
        told("writing: 1.0 MB of 1.0 GB")
    with progress.Stages()("reading the model"):
        told("reading the model")
        told("reading the model")


def test_a_stage_that_lasts_is_named_before_the_first_line_is_due(told, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 1e9)
    with progress.Stages()("measuring", 3, "sequence"):
        told("measuring sequence 1 of 3")


def test_time_left_is_told_after_two_steps(told):
    with progress.Stages()("fitting", 8, "layer", 3) as fitted:
        fitted(1)
        told("fitting layer 5 of 8")
        fitted(1)
        told(r"fitting layer 6 of 8 \(00:00 left\)")


def test_a_short_run_prints_no_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_told", time.time())
    with pytest.raises(KeyboardInterrupt), progress.Stages()("fitting", 4, "layer"):
        raise KeyboardInterrupt
    with progress.Stages()("fitting", 4, "layer"):
        pass
    assert capsys.readouterr().err == ""


def test_a_terminal_has_one_bar(monkeypatch):
    monkeypatch.setattr(progress, "_has_width", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with progress.Stages()("fitting", 4, "layer") as fitted:
        fitted(1)
        with progress.Stages()("refining", 10, "step"):
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


def test_steps_go_to_the_caller_where_there_is_one(capsys):
    steps = []
    stages = progress.Stages(lambda *step: steps.append(step))
    with stages("reading"), stages("write", 10, "B", 4) as wrote:
        wrote(6)
        assert list(stages.over("convert", "ab", 2, "layer")) == ["a", "b"]
    assert steps == [
        ("write", 4, 10),
        ("write", 10, 10),
        *(("convert", done, 2) for done in range(3)),
    ]
    with progress.Stages(quiet=True)("reading"):
        pass
    assert (progress._open, capsys.readouterr().err) == ([], "")
