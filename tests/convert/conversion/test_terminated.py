"""SIGTERM ends a conversion as Ctrl-C does: one error line, and no temporary but one that ``--resume`` goes on from."""

import os
import signal
import time

import pytest
import torch
from helpers import forked

import kvfold.convert.conversion.run  # noqa: F401  what the children need is imported once
from kvfold.convert.cli import main
from kvfold.convert.data import demo_folder
from kvfold.convert.signals import interruptible

CALIBRATED = ["--to", "mqa", "--group", "contiguous", "--samples", "12", "--seq-len", "48", "--refine", "100"]


@pytest.fixture
def terminated(tmp_path, tmp_path_factory):
    """``terminated(options, pattern)``: a run that gets SIGTERM once a path of the pattern is there; how it ended."""
    torch.set_num_threads(1)  # a fork has one thread
    log = tmp_path_factory.mktemp("log")

    def run(options, pattern):
        command = ["convert", str(demo_folder()), str(tmp_path / "out"), *CALIBRATED, *options]
        child = forked.start(log, lambda: main(command))
        until = time.monotonic() + forked.PATIENCE
        while not list(tmp_path.glob(pattern)):
            assert os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, forked.ended(log, child)
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(child, signal.SIGTERM)
        return forked.ended(log, child)

    return run


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_nothing_is_left_of_a_run_without_a_finished_layer(tmp_path, terminated, options):
    end = terminated(options, ".out.kvfold-*")
    assert end.status == 1
    assert end.stderr.splitlines()[-1].startswith("error: interrupted: nothing was left behind")
    assert "Traceback" not in end.stderr
    assert not list(tmp_path.iterdir())


def test_a_resumable_run_keeps_its_finished_layers(tmp_path, terminated):
    end = terminated(["--resume"], ".out.kvfold-*/.journal.json")
    assert end.status == 1
    assert end.stderr.splitlines()[-1].startswith("error: interrupted: ")
    (left,) = tmp_path.iterdir()
    assert (left / ".journal.json").is_file()


def test_a_handler_that_was_there_stays():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_handler_is_gone_afterwards():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
