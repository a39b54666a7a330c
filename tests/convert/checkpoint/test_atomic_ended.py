"""SIGKILL and SIGTERM at every system call of an output folder's life; ``tests/faults`` kills whole
conversions.
"""

import fcntl
import io
import itertools
import os
import shutil
import signal
from contextlib import redirect_stderr
from functools import partial

import click
import pytest
from helpers import forked
from helpers.cases import mostly_slow

from kvfold.convert.checkpoint import atomic
from kvfold.convert.checkpoint.atomic import open_output_folder
from kvfold.convert.console import run_command
from kvfold.convert.errors import InputError

CALLS = (*forked.CALLS, "rmdir", "scandir", (fcntl, "flock"), (atomic, "_exchange_folders"))
RECORD = b'{"files": {"config.json": "", "model.safetensors": ""}}'
FILES = {"config.json": b"{}", "kvfold.json": RECORD, "model.safetensors": b"new"}
OLD = {**FILES, "model.safetensors": b"old"}
OVERWRITING = ("exchange", "aside")


def fill(folder, files):
    for name, content in files.items():
        (folder / name).write_bytes(content)


def prepared(root, kind):
    """OUT in an otherwise empty folder ``root``, old where the run is to overwrite it."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    out = root / "some" / "parents" / "out" if kind == "missing parents" else root / "out"
    if kind in OVERWRITING:
        out.mkdir()
        fill(out, OLD)
    return out


def write(out, kind, number, ending, after=False):
    """A command that writes OUT, with a signal at its ``number``-th call."""

    @click.command()
    def command():
        finished = (
            (lambda folder: (folder / "config.json").exists()) if kind == "resumable" else None
        )
        with open_output_folder(out, overwrite=kind in OVERWRITING, resume=finished) as folder:
            fill(folder, FILES)
            if kind == "failing":
                raise InputError("refused")

    if kind == "aside":  # a system without renameat2
        atomic._exchange_folders = lambda *arguments: False
    forked.at_call(number, lambda: os.kill(os.getpid(), ending), CALLS, after=after)
    run_command(command, [])


@pytest.mark.parametrize("kind", mostly_slow(["new", "exchange", "aside"], 3))
def test_killed_at_every_call(tmp_path, kind):
    """OUT is old, new or absent, never half; the next run cleans up. After a call is as before the
    next one here.
    """
    seen = []
    for number in itertools.count(1):
        out = prepared(tmp_path / "root", kind)
        end = forked.run(tmp_path / "log", partial(write, out, kind, number, signal.SIGKILL))
        seen.append(forked.snapshot(out))
        if kind == "aside" and not seen[-1]:  # it lies aside: even a run that fails puts it back
            with pytest.raises(ZeroDivisionError), open_output_folder(out, overwrite=True):
                raise ZeroDivisionError
            assert forked.snapshot(out) == OLD
        if end.status == 0:
            break
        assert end.status == -signal.SIGKILL
        with open_output_folder(out, overwrite=True) as folder:
            fill(folder, {"config.json": b"newer"})
        assert forked.snapshot(tmp_path / "root") == {"out/config.json": b"newer"}
    assert number > 15
    between = {"new": [{}], "exchange": [OLD], "aside": [OLD, {}]}[kind]
    assert all(files in seen for files in between)
    assert all(files in [*between, FILES] for files in seen)
    assert seen[-1] == FILES


def terminated(root, kind, number, after):
    """False if the command ended before its ``number``-th call. OUT is old or new, and nothing else
    is left.
    """
    out = prepared(root, kind)
    stderr = io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        for call in CALLS:  # restores them
            module, name = (os, call) if isinstance(call, str) else call
            patched.setattr(module, name, getattr(module, name))
        with redirect_stderr(stderr), pytest.raises(SystemExit) as ended:
            write(out, kind, number, signal.SIGTERM, after)
    said = stderr.getvalue()
    left = [path for path in root.iterdir() if not out.is_relative_to(path)]
    interrupted = "error: interrupted" in said
    assert "Traceback" not in said
    assert interrupted or ended.value.code == (2 if kind == "failing" else 0)
    if kind == "resumable" and not out.exists():
        assert all((path / "config.json").exists() for path in left), number
        assert len(left) < 2
    else:
        assert not left, (number, left)
    if out.exists():
        assert forked.snapshot(out) in ([FILES, OLD] if interrupted else [FILES])
    else:
        assert kind == "failing" or interrupted
        assert not (root / "some").exists()
    return interrupted


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "kind", ["new", "missing parents", "exchange", "aside", "failing", "resumable"]
)
def test_terminated_at_every_call(tmp_path, kind, after):
    """One process for all calls: a signal that escaped the command would end it."""

    def every_call():
        last = next(
            number
            for number in itertools.count(1)
            if not terminated(tmp_path / "root", kind, number, after)
        )
        assert last > 10

    end = forked.run(tmp_path / "log", every_call)
    assert end.status == 0, end.stderr


def test_terminated_between_the_folder_and_the_block_that_uses_it(tmp_path):
    """The signal comes when the folder is made, but no ``with`` statement would remove it yet."""

    @click.command()
    def command():
        entered = open_output_folder(tmp_path / "root" / "out")
        entered.__enter__()
        signal.raise_signal(signal.SIGTERM)

    end = forked.run(tmp_path / "log", lambda: run_command(command, []))
    assert "error: interrupted" in end.stderr
    assert not (tmp_path / "root").exists()
