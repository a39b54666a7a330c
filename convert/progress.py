"""Progress on stderr: a tqdm bar on a terminal; otherwise a line for each stage over 2 s, and a
line every 30 s.

Stages nest (refining step 40 of 150 while fitting layer 7 of 32): the bar shows the innermost
stage, prefixed with the names of the others. The time left is estimated from the steps done so far.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvfold.convert.sizes import bytes_text

Item = TypeVar("Item")
Progress = Callable[[str, int, int], None]  # stage, done, total
Advance = Callable[[int], None]

# Seconds when stderr is not a terminal: between lines, before a stage gets its first line, between
# checks.
EVERY = 30.0
LASTS = 2.0
TICK = 0.5
# Name of each stage on stderr, written before its unit: "fitting layer 7 of 32".
_STAGE_NAMES = {
    "survey": "calibrating",
    "splits": "comparing",
    "finals": "refining",
    "again": "walking past the finished layers again,",
    "convert": "fitting",
    "sweep": "fitting each layer for each target,",
    "write": "writing",
    "polish": "polishing",
    "compare": "comparing",
    "floor": "measuring rounding,",
    "bench": "timing",
    "retrieval": "answering questions,",
    "replies": "writing replies,",
    "losses": "measuring the loss by position,",
    "train": "training",
    "evaluate": "measuring on held-out text,",
    "text": "writing the calibration text,",
}


@dataclass
class Stages:
    """Reports the stages of a run: ``with stages("convert", 32, "layer") as advance: advance(1)``.

    Each step is reported to ``progress`` if the caller passed it, otherwise to stderr unless
    ``quiet``. A stage without ``total`` has an unknown length and is not reported to ``progress``.
    """

    progress: Progress | None = None
    quiet: bool = False

    @contextmanager
    def __call__(
        self, name: str, total: int = 0, unit: str = "", done: int = 0
    ) -> Iterator[Advance]:
        """A stage of ``total`` units ("B": bytes), ``done`` before it began; yields a function of
        the next amount.
        """
        this = _Stage(_STAGE_NAMES.get(name, name), total, unit, done, done)
        shown = self.progress is None and not self.quiet

        def advance(amount: int) -> None:
            # Another thread copies bytes while layers are fitted.
            with _lock:
                this.done += amount
                if self.progress is not None and total:
                    self.progress(name, this.done, total)
                if _bar is not None and _open[-1:] == [this]:
                    _bar.update(amount)

        advance(0)
        if not shown:
            yield advance
            return
        with _lock:
            _open.append(this)
            _show()
        try:
            yield advance
        finally:
            with _lock:
                _open.remove(this)
                _show()

    def over(
        self, name: str, items: Iterable[Item], total: int, unit: str, done: int = 0
    ) -> Iterator[Item]:
        """Iterate over ``items``, advancing the stage by one unit after each."""
        with self(name, total, unit, done) as advance:
            for item in items:
                yield item
                advance(1)


@dataclass(eq=False)
class _Stage:
    name: str
    total: int
    unit: str
    kept: int  # units complete before the stage began
    done: int
    begun: float = field(default_factory=time.time)

    def text(self) -> str:
        """The progress text, such as "fitting layer 7 of 32 (12:40 left)", "writing: 1.2 GB of 5.0
        GB" or "reading".
        """
        if not self.total:
            return self.name
        counted = f" {self.unit} {min(self.done + 1, self.total)} of {self.total}"
        if self.unit == "B":
            counted = f": {bytes_text(self.done)} of {bytes_text(self.total)}"
        made = self.done - self.kept
        # The first layer or step is slower than the rest.
        if made < 2:
            return self.name + counted
        from tqdm import tqdm

        left = (time.time() - self.begun) / made * (self.total - self.done)
        return f"{self.name}{counted} ({tqdm.format_interval(left)} left)"


_lock = threading.RLock()
_open: list[_Stage] = []  # outermost first
_bar: Any = None  # shows the innermost stage
_watching = False
# Time of the last line and its outermost stage; a series of short stages also gets a line every
# `EVERY` seconds.
_told = time.time()
_named = ""


def _show() -> None:
    """Draw a new bar for the innermost stage; without a terminal, start a thread that prints lines."""
    global _bar, _watching
    if _bar is not None:
        _bar.close()
        _bar = None
    if not _open:
        return
    if not _has_width():
        if not _watching:
            _watching = True
            threading.Thread(target=_watch, daemon=True).start()
        return
    from tqdm import tqdm

    this = _open[-1]
    _bar = tqdm(
        desc=_line(this.name),
        total=this.total or None,
        initial=this.kept,
        unit=this.unit,
        unit_scale=this.unit == "B",
        bar_format=None if this.total else "{desc} {elapsed}",
        leave=False,
        smoothing=0,
        dynamic_ncols=True,
        file=sys.stderr,
    )
    # The stage may be continuing after a nested stage ended.
    _bar.n = this.done
    _bar.start_t = this.begun
    _bar.refresh()


def _watch() -> None:
    """Until no stage is open, print a line for each outermost stage over `LASTS` and one every
    `EVERY` seconds.
    """
    global _told, _named, _watching
    # A thread, because some stages take minutes per step or report no steps.
    while True:
        time.sleep(TICK)
        with _lock:
            if not _open:
                _watching = False
                _named = ""
                return
            now = time.time()
            outer = _open[0]
            if now - _told >= EVERY or (outer.name != _named and now - outer.begun >= LASTS):
                _told = now
                _named = outer.name
                print(
                    f"[{time.strftime('%H:%M:%S')}] {_line(_open[-1].text())}",
                    file=sys.stderr,
                    flush=True,
                )


def _line(text: str) -> str:
    """The innermost stage's ``text``, prefixed with the enclosing stages that have a total."""
    # Bytes are copied in parallel and are not part of the current step.
    around = [each.text() for each in _open[:-1] if each.total and each.unit != "B"]
    return ", ".join([*around, text])


def _has_width() -> bool:
    """True if stderr is a terminal of known size; tqdm draws nothing on a terminal with 0 columns."""
    try:
        return sys.stderr.isatty() and all(os.get_terminal_size(sys.stderr.fileno()))
    except (OSError, ValueError):
        return False
