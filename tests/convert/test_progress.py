"""Stages on stderr: bars on a terminal, lines where it is none, steps for a caller's function."""

import io
import re
import sys
import time

from kvfold.convert import progress


def test_without_a_terminal_a_line_gives_the_stage_and_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.05)
    stages = progress.ProgressStages()
    with stages("convert", 32, "layer", 5) as advance:
        advance(1)
        advance(1)
        time.sleep(0.2)
        with stages("teacher", 1, "layer"):
            pass
    shown = capsys.readouterr().err
    assert re.fullmatch(
        r"convert 7/32 layers \|.*\| 00:00, about \d+ s left", shown.splitlines()[0]
    )
    assert "\x1b" not in shown


def open_terminal(monkeypatch):
    """Make stderr a stream that says that it is a terminal. No fixture: pytest puts stderr back
    between a fixture and its test.
    """
    monkeypatch.setattr(progress, "_BAR_SECONDS", 0.02)
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_terminal_has_bars_that_move_between_steps(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with progress.ProgressStages()("convert", 4, "layer"), progress.ProgressStages()("reading"):
        time.sleep(0.2)
    assert re.search(r"\rconvert 0/4 layers .*\rreading", terminal.getvalue(), re.DOTALL)
    assert terminal.getvalue().count("reading") > 2
    assert sys.stderr is terminal


def test_messages_stand_on_lines_of_their_own_above_the_bars(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with progress.ProgressStages()("reading"):
        print("calibrating", "on text", file=sys.stderr)
    assert re.search(r"[\r\n]calibrating on text\n", terminal.getvalue())


def test_an_estimate_gives_the_time_left_before_the_first_step_and_yields_to_the_pace(monkeypatch):
    terminal = open_terminal(monkeypatch)
    stages = progress.ProgressStages(estimates={"polish": 1000.0})
    with stages("polish", 100, "step") as advance:
        time.sleep(0.1)
        for _ in range(99):
            advance(1)
        time.sleep(0.2)
    left = re.findall(r"polish (\d+)/100 .*?about (\d+) (min|s) left", terminal.getvalue())
    assert ("0", "17", "min") in left
    assert left[-1][0] == "99"
    assert left[-1][2] == "s"
    assert int(left[-1][1]) <= 10


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
