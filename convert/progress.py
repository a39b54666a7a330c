"""Progress on stderr by tqdm: a bar for each stage on a terminal, otherwise a line every 30 s."""

import io
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from kvfold.convert.formatting import format_duration

Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]  # stage, units done, total
Advance = Callable[[int], None]

_BAR_SECONDS = 1.0  # between two states of a bar
_LINE_SECONDS = 30.0  # between lines where stderr is no terminal
# Part of a stage that its estimate counts as much as: chosen, not tuned.
_TRUST = 0.1


class _StageBar(tqdm):  # type: ignore[type-arg]
    """A tqdm progress bar that shows the time left, by the pace so far and by ``estimate``."""

    estimate = 0.0  # seconds of the whole stage; 0 if nobody knows
    seconds = 0.0  # seconds until the last unit was finished

    @property
    def format_dict(self) -> Any:
        """The values that ``bar_format`` names: tqdm's, and ``left``."""
        values = super().format_dict
        finished = self.n - self.initial
        remaining = (self.total or 0) - self.n
        units = finished + remaining
        # The first units of a stage also pay for what is done once.
        known = finished + (_TRUST * units if self.estimate else 0.0)
        values["left"] = ""
        if remaining and known:
            pace = (self.seconds + self.estimate * _TRUST) / known
            since = values["elapsed"] - self.seconds
            left = max(remaining * pace - since, (remaining - 1) * pace)
            values["left"] = f", about {format_duration(left)} left"
        return values


class _LinesAboveBars(DummyTqdmFile):
    """A terminal's stderr while it shows bars: lines that others print appear above them."""

    def write(self, text: str, nolock: bool = False) -> None:
        """Print the lines of ``text`` that are complete. What tqdm itself writes passes through."""
        moves = not text.replace("\x1b[A", "").strip()
        if "\r" in text or (moves and not any(self._buf)):
            self._wrapped.write(text)
        else:
            super().write(text, nolock)


@contextmanager
def _keep_moving(bar: _StageBar, stderr: Any) -> Iterator[None]:
    """A context manager in which ``bar`` is drawn again and again."""
    ended = threading.Event()
    terminal = stderr.isatty()

    def draw() -> None:
        while not ended.wait(_BAR_SECONDS if terminal else _LINE_SECONDS):
            if terminal:
                bar.refresh()
            else:
                print(bar, file=stderr, flush=True)

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        above: Any = _LinesAboveBars(stderr)
        with redirect_stderr(above) if terminal else nullcontext():
            yield
    finally:
        ended.set()
        thread.join()


@dataclass
class ProgressStages:
    """Reports the progress of a run, stage by stage: ``with stages("convert", 32, "layer") as
    advance: advance(1)``.

    Each step is reported to ``progress`` if the caller passed it, otherwise to stderr unless
    ``quiet``. A stage without ``total`` has an unknown length and is only shown on a terminal.
    ``estimates`` are the seconds of stages by name, as far as they are known before.
    """

    progress: Progress | None = None
    quiet: bool = False
    estimates: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(
        self, name: str, total: int = 0, unit: str = "", done: int = 0
    ) -> Iterator[Advance]:
        """A context manager for a stage of ``total`` units ("B" means bytes), of which ``done`` are
        finished. Its value is a function, to be called with the number of units finished since its
        last call.
        """
        stderr = sys.stderr._wrapped if isinstance(sys.stderr, _LinesAboveBars) else sys.stderr
        terminal = stderr.isatty()
        amount = f"{{n_fmt}}/{{total_fmt}} {'byte' if unit == 'B' else unit}s |{{bar}}| "
        bar = _StageBar(
            desc=name,
            total=total,
            initial=done,
            unit_scale=unit == "B",
            bar_format=f"{{desc}} {amount * bool(total)}{{elapsed}}{{left}}",
            mininterval=0.1 if terminal else float("inf"),
            miniters=1,
            leave=False,
            dynamic_ncols=True,
            file=stderr if terminal else io.StringIO(),  # lines are printed by _keep_moving
            disable=self.quiet or self.progress is not None or not (terminal or total),
        )
        bar.estimate = self.estimates.get(name, 0.0)

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            if amount and not bar.disable:
                bar.seconds = bar.format_dict["elapsed"]
            bar.update(amount)
            if self.progress is not None and total:
                self.progress(name, done, total)

        with bar, nullcontext() if bar.disable else _keep_moving(bar, stderr):
            advance(0)
            yield advance

    def iterate_over(
        self, name: str, items: Iterable[Item], total: int, unit: str
    ) -> Iterator[Item]:
        """Iterate over ``items`` as a stage, which advances by one unit after each item."""
        with self(name, total, unit) as advance:
            for item in items:
                yield item
                advance(1)
