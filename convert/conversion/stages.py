"""The progress of a conversion, stage by stage: reported to the caller, or shown on stderr."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvfold.convert.progress import stage as shown_stage

Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]  # stage, done, total

_SHOWN = {  # a stage's name on stderr, before its unit: "fitting layer 7 of 32"
    "survey": "calibrating",
    "splits": "comparing",
    "finals": "refining",
    "layouts": "comparing",
    "again": "walking past the finished layers again,",
    "convert": "fitting",
    "sweep": "fitting each layer for each target,",
    "write": "writing",
    "polish": "polishing",
    "text": "writing the calibration text,",
}


class Stages:
    """``with stages("convert", 32, "layer") as advance: advance(1)``.

    Each step goes to ``progress`` where the caller gave one, else to stderr (nothing with ``quiet``).
    """

    def __init__(self, progress: Progress | None, quiet: bool) -> None:
        self._progress, self._quiet = progress, quiet
        self._lock = threading.Lock()  # bytes are copied by a thread of their own

    @contextmanager
    def __call__(self, stage: str, total: int, unit: str, done: int = 0) -> Iterator[Callable[[int], None]]:
        """A stage of ``total`` units, ``done`` of them already."""
        if self._progress is not None:
            yield self._reported(self._progress, stage, total, done)
        elif self._quiet:
            yield lambda amount: None
        else:
            with shown_stage(_SHOWN.get(stage, stage), total, unit, done) as shown:
                yield shown

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """What is shown on stderr while no stage within the block is; ``progress`` does not hear of it."""
        if self._progress is not None or self._quiet:
            yield
            return
        with shown_stage(name):
            yield

    def over(self, stage: str, items: Iterable[Item], total: int, unit: str, done: int = 0) -> Iterator[Item]:
        """``items``, each a unit of the stage."""
        with self(stage, total, unit, done) as advance:
            for item in items:
                yield item
                advance(1)

    def _reported(self, progress: Progress, stage: str, total: int, done: int) -> Callable[[int], None]:
        count = done
        progress(stage, count, total)

        def advance(amount: int) -> None:
            nonlocal count
            with self._lock:
                count += amount
                progress(stage, count, total)

        return advance
