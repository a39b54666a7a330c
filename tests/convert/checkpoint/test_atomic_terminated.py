"""SIGTERM at every system call of an output folder's life: OUT is old or new, and nothing else is left."""

import itertools
import shutil
import signal
from pathlib import Path

import click
import pytest
from helpers import forked

from kvfold.convert.checkpoint import atomic
from kvfold.convert.checkpoint.atomic import output_folder
from kvfold.convert.console import run_command
from kvfold.convert.errors import InputError

CALLS = (*forked.CALLS, "rmdir", "scandir")
FILES = {"config.json": b"{}", "model.safetensors": b"new"}
OLD = {"config.json": b"{}", "model.safetensors": b"old"}


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def run(log: Path, out: Path, kind: str, number: int, after: bool) -> forked.Ended:
    """A command that writes OUT, with SIGTERM at the ``number``-th call."""

    @click.command()
    def command() -> None:
        finished = (lambda folder: (folder / "config.json").exists()) if kind == "resumable" else None
        with output_folder(out, overwrite=kind in ("exchange", "aside"), resume=finished) as folder:
            for name, content in FILES.items():
                (folder / name).write_bytes(content)
            if kind == "failing":
                raise InputError("refused")

    def work() -> None:
        if kind == "aside":
            atomic._renameat2 = lambda *arguments: False
        forked.at_call(number, terminate, CALLS, after=after)
        run_command(command, "command", [])

    return forked.run(log, work)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["new", "missing parents", "exchange", "aside", "failing", "resumable"])
def test_terminated_at_every_call(tmp_path: Path, kind: str, after: bool) -> None:
    root = tmp_path / "root"
    out = root / "some" / "parents" / "out" if kind == "missing parents" else root / "out"
    for number in itertools.count(1):
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        if kind in ("exchange", "aside"):
            out.mkdir()
            for name, content in OLD.items():
                (out / name).write_bytes(content)
        end = run(tmp_path / "log", out, kind, number, after)
        assert "Traceback" not in end.stderr
        interrupted = "error: interrupted" in end.stderr
        assert interrupted or end.status == (2 if kind == "failing" else 0)
        left = [path for path in root.iterdir() if not out.is_relative_to(path)]
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
        if not interrupted:
            break
    assert number > 10


def test_terminated_between_the_folder_and_the_block_that_uses_it(tmp_path: Path) -> None:
    """The signal comes when the folder is made, but no ``with`` statement would remove it yet."""

    @click.command()
    def command() -> None:
        entered = output_folder(tmp_path / "root" / "out")
        entered.__enter__()
        terminate()

    end = forked.run(tmp_path / "log", lambda: run_command(command, "command", []))
    assert "error: interrupted" in end.stderr
    assert not (tmp_path / "root").exists()
