"""Signals that end a command, how to defer them in code that they must not interrupt, and limits
for foreign code.

A handler may raise KeyboardInterrupt between any two bytecodes of the main thread: even between the
call that creates a folder and the ``try`` whose ``finally`` removes it, or inside that ``finally``.
``DeferredSignals`` prevents both.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

ENDING_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)  # Ctrl-C, job schedulers, a closed terminal
_RESEND_SECONDS = 0.02  # by then the finalizer that swallowed a KeyboardInterrupt has returned


@dataclass
class DeferredSignals:
    """Defers signals while files are created or removed, and delivers them in between::

        with DeferredSignals() as signals:
            create()
            try:
                signals.deliver()
                work()
            finally:
                signals.deferred = True
                remove()

    A deferred signal is sent again at the end. Has no effect outside the main thread, where Python
    runs no handlers. Blocks may be nested.
    """

    # A plain attribute: CPython checks for signals only at calls and backward jumps, so no signal
    # can arrive between the end of ``work`` and the assignment.
    deferred: bool = False
    _handlers: dict[int, Callable[[int, FrameType | None], Any]] = field(default_factory=dict)
    _waiting: list[int] = field(default_factory=list)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING_SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._receive)
        self.deferred = True
        return self

    def deliver(self) -> None:
        """Stop deferring signals, and raise the deferred one if there is one."""
        self.deferred = False
        if self._waiting:
            signal.raise_signal(self._waiting.pop())

    def __exit__(self, *exception: object) -> None:
        # If a signal keeps a handler below from being restored, ``_receive`` passes signals on from
        # here.
        self.deferred = False
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        self.deliver()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.deferred:
            self._waiting = [number]
        else:
            self._handlers[number](number, frame)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block, the first ending signal raises KeyboardInterrupt; later ones are ignored
    during clean-up.

    Signals that are ignored (as under ``nohup``) or already have another handler are not changed.
    """
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    ours = [
        number
        for number, handler in before.items()
        if handler in (signal.SIG_DFL, signal.default_int_handler)
    ]
    raised = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise KeyboardInterrupt(number)

    def resend(problem: "sys.UnraisableHookArgs") -> None:
        # Python drops exceptions raised in finalizers and import callbacks, so the signal is sent
        # again.
        nonlocal raised
        if isinstance(problem.exc_value, KeyboardInterrupt) and problem.exc_value.args:
            raised = False
            threading.Timer(
                _RESEND_SECONDS, os.kill, (os.getpid(), problem.exc_value.args[0])
            ).start()
        else:
            hook(problem)

    if threading.current_thread() is not threading.main_thread():
        ours = []
    for each in ours:
        signal.signal(each, interrupt)
    hook = sys.unraisablehook
    sys.unraisablehook = resend
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for each in ours:
            signal.signal(each, before[each])


@contextmanager
def _little_memory(most_bytes: int) -> Iterator[None]:
    """Within the block this process gets at most ``most_bytes`` more memory; MemoryError beyond.
    Only on Linux.
    """
    try:
        held = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = [
        limit for limit in (held + most_bytes, before, hard) if limit != resource.RLIM_INFINITY
    ]
    resource.setrlimit(resource.RLIMIT_DATA, (min(allowed), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


@contextmanager
def limited(seconds: float, most_bytes: int = 512 << 20) -> Iterator[None]:
    """Raise TimeoutError in the block after ``seconds``, in any thread; MemoryError beyond
    ``most_bytes`` of memory.

    For data from a checkpoint that Python code interprets, such as a chat template: a single
    operation in C is not interrupted, but cannot get the memory either.
    """
    ended = threading.Event()
    thread = threading.get_ident()

    def watch() -> None:
        # Again and again: code that an exception cannot leave, such as a finalizer, swallows it.
        while not ended.wait(seconds):
            # no signal: it would reach only the main thread
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(TimeoutError)
            )

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        with _little_memory(most_bytes):
            yield
    finally:
        ended.set()
        watcher.join()
