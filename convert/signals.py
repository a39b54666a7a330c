"""Signals that end a command, and stretches of code that such a signal must not split.

A handler raises KeyboardInterrupt between any two bytecodes of the main thread: also between the call that makes a
folder and the ``try`` whose ``finally`` removes it, or in that ``finally``. ``DeferredSignals`` closes both windows.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, job schedulers, a closed terminal
_RESEND_SECONDS = 0.02  # the finalizer that swallowed a KeyboardInterrupt has returned by then


@dataclass
class DeferredSignals:
    """Holds signals back while files are created or removed, and lets them through in between::

        with DeferredSignals() as signals:
            create()
            try:
                signals.deliver()
                work()
            finally:
                signals.deferred = True
                remove()

    A signal that was held back is sent again at the end. Outside the main thread, where Python runs no handlers, this
    does nothing. Can be nested.
    """

    # A plain attribute: CPython looks for signals at calls and backward jumps only, so that none can come between the
    # end of ``work`` and the assignment.
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
        """Let signals through again, first the one that was held back."""
        self.deferred = False
        if self._waiting:
            signal.raise_signal(self._waiting.pop())

    def __exit__(self, *exception: object) -> None:
        # From here on a handler that is not restored, because of a signal, passes signals on.
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
    """Ending signals raise KeyboardInterrupt in the block, once: a second one does not disturb the clean-up.

    Signals that the parent process made us ignore (``nohup``), or that have a handler already, stay as they are.
    """
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    ours = [number for number, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)]
    raised = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise KeyboardInterrupt(number)

    def resend(problem: "sys.UnraisableHookArgs") -> None:
        # Python drops what is raised in a finalizer or in a callback of an import: the signal is sent again.
        nonlocal raised
        if isinstance(problem.exc_value, KeyboardInterrupt) and problem.exc_value.args:
            raised = False
            threading.Timer(_RESEND_SECONDS, os.kill, (os.getpid(), problem.exc_value.args[0])).start()
        else:
            hook(problem)

    if threading.current_thread() is not threading.main_thread():
        ours = []
    for each in ours:
        signal.signal(each, interrupt)
    hook, sys.unraisablehook = sys.unraisablehook, resend
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for each in ours:
            signal.signal(each, before[each])
