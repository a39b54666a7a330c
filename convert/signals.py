"""Signals that end a command, and code that they must not interrupt.

A handler may raise KeyboardInterrupt between any two bytecodes of the main thread: even between the
call that creates a folder and the ``try`` whose ``finally`` removes it, or inside that ``finally``.
``DeferredSignals`` prevents both.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

# Ctrl-C, job schedulers and containers, a closed terminal
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLEAN_UP_SECONDS = 10  # in which further signals are ignored; chosen


@dataclass
class DeferredSignals:
    """Defers signals while files are created or removed, and delivers them at safe points in
    between.

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
                    signal.signal(number, self._handle_signal)
        self.deferred = True
        return self

    def deliver(self) -> None:
        """Stop deferring signals, and raise the exception of a signal that arrived meanwhile."""
        self.deferred = False
        if self._waiting:
            signal.raise_signal(self._waiting.pop())

    def __exit__(self, *exception: object) -> None:
        # If a signal keeps a handler below from being restored, ``_handle_signal`` passes signals
        # on.
        self.deferred = False
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.deliver()

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal if signals are deferred, otherwise pass it to the handler that it had
        before.
        """
        if self.deferred:
            self._waiting = [number]
        else:
            self._handlers[number](number, frame)


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """While the context lasts, SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does.

    Further signals are ignored for 10 seconds, in which the run cleans up. Signals that are ignored
    (as under ``nohup``) or already have another handler are not changed.
    """
    last = -float("inf")

    def raise_interrupt(number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, unless another signal came in the 10 seconds before this one; so
        each ignored signal extends the time in which signals are ignored.
        """
        nonlocal last
        before = last
        last = time.monotonic()
        if last - before > _CLEAN_UP_SECONDS:
            raise KeyboardInterrupt

    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    for number, handler in handlers.items():
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, raise_interrupt)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
