"""Stages on stderr: lines where it is no terminal, one bar where it is."""

import io
import os
import re
import sys
import time

import pytest

from kvfold.convert import progress
from kvfold.convert.cli import main


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(found: str, shown) -> str:
    for _ in range(500):
        if found in (text := shown()):
            return text
        time.sleep(0.01)
    pytest.fail(f"no {found!r} in {shown()!r}")


def test_a_line_now_and_then_names_what_is_being_done(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.01)
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())
    with (
        progress.stage("reading"),
        progress.stage("writing", 10**9, "B") as wrote,
        progress.stage("fitting", 32, "layer", 5) as fitted,
    ):
        fitted(1)
        wrote(10**6)
        with progress.stage("refining", 150, "step") as refined:
            refined(39)
            wait_for("[0:00] fitting layer 7 of 32, refining step 40 of 150\n", told.getvalue)
        wait_for("[0:00] fitting layer 7 of 32\n", told.getvalue)
    ended = told.getvalue()
    with progress.stage("writing", 10**9, "B", 10**6):
        wait_for("[0:00] writing: 1.0 MB of 1.0 GB\n", told.getvalue)
    assert "writing" not in ended


def test_many_short_stages_have_a_line_now_and_then_and_one_clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress, "_DISPLAY", progress._Display())
    monkeypatch.setattr(progress.time, "time", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())
    for seconds in (40, 40):
        with progress.stage("fitting", 4, "layer"):
            now[0] += seconds
    monkeypatch.setattr(progress, "EVERY", 0.1)  # waited for by the real clock
    now[0] -= 0.01  # as if right behind the one before
    with progress.stage("measuring"):
        wait_for("[1:19] measuring\n", told.getvalue)


def test_every_command_has_a_clock_of_its_own(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress, "_DISPLAY", progress._Display())
    monkeypatch.setattr(progress.time, "time", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())
    with progress.stage("reading"):
        now[0] += 40
    with pytest.raises(SystemExit):
        main(["--version"])
    monkeypatch.setattr(progress, "EVERY", 0.1)  # waited for by the real clock
    with progress.stage("measuring"):
        wait_for("[0:00] measuring\n", told.getvalue)


def test_a_terminal_has_one_bar_that_is_gone_at_the_end(monkeypatch):
    monkeypatch.setattr(progress, "_LEAST", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress.stage("fitting", 4, "layer") as fitted:
        fitted(1)
        with progress.stage("refining", 10, "step") as refined:
            refined(5)
    text = terminal.getvalue()
    assert "\n" not in text  # a second bar would be on a line of its own
    assert re.search(r"fitting layer 2 of 4: +25%", text)
    assert re.search(r"fitting layer 2 of 4, refining step 6 of 10: +50%", text)
    assert text.rstrip("\r").endswith(" ")  # overwritten


def test_a_terminal_that_does_not_know_its_size_has_a_bar_too(monkeypatch):
    master, slave = os.openpty()  # 0 columns, 0 lines
    os.set_blocking(master, False)
    with os.fdopen(slave, "w") as stderr, os.fdopen(master, encoding="utf-8", newline="") as seen:
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress.stage("fitting", 4, "layer"):
            wait_for("fitting layer 1 of 4:   0%", seen.read)


def test_an_error_ends_the_stages(monkeypatch):
    monkeypatch.setattr(sys, "stderr", told := io.StringIO())
    with pytest.raises(KeyboardInterrupt), progress.stage("fitting", 4, "layer"):
        raise KeyboardInterrupt
    assert told.getvalue() == ""
    assert not progress._DISPLAY._stages
