"""SIGTERM ends a conversion as Ctrl-C does: one error line, and no temporary but one that ``--resume`` goes on from."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.processes import PATIENCE

from kvfold.convert import console as command
from kvfold.convert.data import demo_folder

CALIBRATED = ["--to", "mqa", "--group", "contiguous", "--samples", "12", "--seq-len", "48", "--refine", "100"]


def start(out, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "kvfold.convert", "convert", str(demo_folder()), str(out), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def terminate_when(process, there):
    """Sends SIGTERM once ``there()`` is true; returns what was on stderr."""
    until = time.monotonic() + PATIENCE
    while not there():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=PATIENCE)[1]


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_nothing_is_left_of_a_run_without_a_finished_layer(tmp_path, options):
    process = start(tmp_path / "out", *CALIBRATED, *options)
    errors = terminate_when(process, lambda: list(tmp_path.glob(".out.kvfold-*")))
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("error: interrupted: nothing was left behind")
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_resumable_run_keeps_its_finished_layers(tmp_path):
    process = start(tmp_path / "out", *CALIBRATED, "--resume")
    errors = terminate_when(process, lambda: list(tmp_path.glob(".out.kvfold-*/.journal.json")))
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("error: interrupted: ")
    (left,) = tmp_path.iterdir()
    assert (left / ".journal.json").is_file()


def test_a_handler_that_was_there_stays():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with command._terminable():
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_handler_is_gone_afterwards():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt), command._terminable():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
