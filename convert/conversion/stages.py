"""The progress of a conversion, stage by stage: reported to the caller, or shown as bars on stderr."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvfold.convert.console import bar

Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]  # stage, done, total


class Stages:
    """``with stages("layers", 32) as advance: advance(1)``.

    Each step goes to ``progress`` where the caller gave one, else to a bar on stderr (none with ``quiet``).
    """

    def __init__(self, progress: Progress | None, quiet: bool) -> None:
        self._progress, self._quiet = progress, quiet
        self._lock = threading.Lock()  # bytes are copied by a thread of their own

    @contextmanager
    def __call__(self, stage: str, total: int, unit: str, done: int = 0) -> Iterator[Callable[[int], None]]:
        """A stage of ``total`` units, ``done`` of them already."""
        if self._progress is None:
            with bar(total, unit, self._quiet) as shown:
                shown(done)
                yield shown
            return
        progress, count = self._progress, done
        progress(stage, count, total)

        def advance(amount: int) -> None:
            nonlocal count
            with self._lock:
                count += amount
                progress(stage, count, total)

        yield advance

    def over(self, stage: str, items: Iterable[Item], total: int, unit: str, done: int = 0) -> Iterator[Item]:
        """``items``, each a unit of the stage."""
        with self(stage, total, unit, done) as advance:
            for item in items:
                yield item
                advance(1)
