"""Progress on stderr by tqdm: a bar for each stage on a terminal, otherwise a line every 30 s."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]  # stage, units done, total
Advance = Callable[[int], None]

_LINE_SECONDS = 30.0  # between lines where stderr is no terminal


class _LineProgress(tqdm):  # type: ignore[type-arg]
    """A tqdm progress bar that prints a line now and then instead of redrawing a bar."""

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """A function that prints a status as a line of its own."""
        return lambda text: print(text, file=file, flush=True) if text.strip() else None


@dataclass
class ProgressStages:
    """Reports the progress of a run, stage by stage: ``with stages("convert", 32, "layer") as
    advance: advance(1)``.

    Each step is reported to ``progress`` if the caller passed it, otherwise to stderr unless
    ``quiet``. A stage without ``total`` has an unknown length and is only shown on a terminal.
    """

    progress: Progress | None = None
    quiet: bool = False

    @contextmanager
    def __call__(
        self, name: str, total: int = 0, unit: str = "", done: int = 0
    ) -> Iterator[Advance]:
        """A context manager for a stage of ``total`` units ("B" means bytes), of which ``done`` are
        finished. Its value is a function, to be called with the number of units finished since its
        last call.
        """
        terminal = sys.stderr.isatty()
        seconds = 0.1 if terminal else _LINE_SECONDS
        bar = (tqdm if terminal else _LineProgress)(
            desc=name,
            total=total,
            initial=done,
            unit=unit,
            unit_scale=unit == "B",
            bar_format=None if total else "{desc}",
            mininterval=seconds,
            miniters=1,
            delay=0 if terminal else seconds,
            smoothing=0,
            leave=False,
            dynamic_ncols=True,
            disable=self.quiet or self.progress is not None or not (terminal or total),
        )

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            bar.update(amount)
            if self.progress is not None and total:
                self.progress(name, done, total)

        with bar:
            advance(0)
            yield advance

    def iterate_over(
        self, name: str, items: Iterable[Item], total: int, unit: str, done: int = 0
    ) -> Iterator[Item]:
        """Iterate over ``items`` as a stage, which advances by one unit after each item."""
        with self(name, total, unit, done) as advance:
            for item in items:
                yield item
                advance(1)
