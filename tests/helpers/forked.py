"""Command lines of kvfold in forked children, in which one call of the system fails, is killed, or
meets a change.

A fork of a process that has imported torch and transformers starts in milliseconds, a new one after
seconds of imports.
"""

import gc
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial

PATIENCE = 120  # seconds of wall time: a child that takes longer hangs

# The calls of a conversion that reach the disk. ``preadv`` and ``pread`` read
# the source, all others write OUT.
WRITES = ("mkdir", "rename", "fsync", "ftruncate", "pwrite", "write")
CALLS = (*WRITES, "open", "close", "unlink", "preadv", "pread")


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit status, or minus the signal that killed it; what it printed."""

    status: int
    stdout: str
    stderr: str


def start(folder, work):
    """Fork a child that does ``work`` and leaves what it prints in ``folder``. Returns its process
    id.
    """
    return os.fork() or _become(folder, work)


def ended(folder, child):
    """Wait for a child of ``start``. AssertionError when it hangs."""
    limit = time.monotonic() + PATIENCE
    while (waited := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(
                f"a child hung for {PATIENCE} s: {(folder / 'stderr').read_text()}"
            )
        time.sleep(0.005)
    out, err = ((folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    return Ended(os.waitstatus_to_exitcode(waited[1]), out, err)


def run(folder, work):
    """``start`` and ``ended``."""
    folder.mkdir(parents=True, exist_ok=True)
    return ended(folder, start(folder, work))


def run_ranks(folder, work, count=2):
    """``count`` children that do ``work`` at once, each with its RANK in the environment that
    torchrun would set.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def ranked(rank):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(count))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        work()

    children = {}
    for rank in range(count):
        (each := folder / f"rank{rank}").mkdir(parents=True)
        children[each] = start(each, partial(ranked, rank))
    return [ended(each, child) for each, child in children.items()]


def _become(folder, work):
    status = 70
    gc.freeze()  # what the parent imported is not looked through again
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
        os.environ["TOKENIZERS_PARALLELISM"] = (
            "false"  # its threads are not forked, of which it would warn
        )
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        sys.__stdout__ = sys.stdout
        if "torch" in sys.modules:
            # A fork makes torch's thread pool anew at its first use, which threads must not race
            # for: the loader of transformers has some ("Invalid thread pool!").
            import torch

            torch.set_num_threads(torch.get_num_threads())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def at_call(number, action, calls=CALLS, lasting=False, after=False):
    """From now on do ``action`` before the ``number``-th of ``calls`` in this process; returns a
    count of them.

    ``calls`` are functions of ``os`` by name, or of another module as (module, name). ``lasting``:
    before every later one too. ``after``: not before but after it.
    """
    count = 0

    def counted(function):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            now = count == number or (lasting and count > number)
            if now and not after:
                action()
            try:
                return function(*arguments, **options)
            finally:
                if now and after:
                    action()

        return call

    for call in calls:
        module, name = (os, call) if isinstance(call, str) else call
        setattr(module, name, counted(getattr(module, name)))
    return lambda: count


def snapshot(folder):
    """The contents of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
