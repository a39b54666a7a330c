"""Signals end a command once; what cleans up after it is not disturbed by a second one.

They are raised in the thread itself: one that is sent to the process may reach another thread
first, and come late.
"""

import signal

import pytest

from kvfold.convert import signals
from kvfold.convert.checkpoint import atomic
from kvfold.convert.signals import interrupt_on_signals

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def foreground():
    """The signals as they are in a terminal: what runs in the background may have been started to
    ignore some.
    """
    before = [signal.signal(number, signal.default_int_handler) for number in ENDING]
    yield
    for number, handler in zip(ENDING, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_a_second_signal_is_ignored(number):
    before = list(map(signal.getsignal, ENDING))
    cleaned = []

    def work():
        try:
            signal.raise_signal(number)
        finally:
            for further in ENDING:
                signal.raise_signal(further)
                cleaned.append(further)

    with pytest.raises(KeyboardInterrupt), interrupt_on_signals():
        work()
    assert cleaned == [*ENDING]
    assert list(map(signal.getsignal, ENDING)) == before


def test_a_signal_after_the_time_for_cleaning_up_ends_what_swallowed_the_first(monkeypatch):
    monkeypatch.setattr(signals, "_CLEAN_UP_SECONDS", 0)
    with interrupt_on_signals():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupt_on_signals():
        signal.raise_signal(signal.SIGHUP)


def test_a_signal_while_cleaning_up_waits(tmp_path, monkeypatch):
    removed = atomic.shutil.rmtree

    def disturbed(path, **options):
        signal.raise_signal(signal.SIGINT)
        removed(path, **options)

    monkeypatch.setattr(atomic.shutil, "rmtree", disturbed)

    def work():
        with atomic.open_output_folder(tmp_path / "out") as folder:
            (folder / "file").touch()
            raise ValueError

    with pytest.raises(KeyboardInterrupt), interrupt_on_signals():
        work()
    assert not list(tmp_path.iterdir())
