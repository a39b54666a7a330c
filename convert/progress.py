"""The progress of a command on stderr: one named bar at a time on a terminal, a line now and then elsewhere.

Stages nest (fitting layer 7 of 32, in it refining step 40 of 150); the innermost is the one with the bar.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvfold.convert.sizes import bytes_text

EVERY = 50.0  # seconds between lines where stderr is no terminal: at least one a minute
_REDRAWN = 1.0  # seconds between refreshed bars: the time of a stage passes even where nothing advances
_LEAST = 0.1  # seconds between two drawings for steps
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
_NO_BAR = "{desc} {elapsed}"
_SIZE = {
    "ncols": 79,
    "nrows": 24,
}  # of a terminal that does not know its own, as in a container: tqdm draws nothing there


@dataclass(eq=False)
class Stage:
    """``done`` of ``total`` units; with ``total`` 0 the stage has no known length. ``kept``: done before it began."""

    name: str
    total: int = 0
    unit: str = ""
    kept: int = 0
    done: int = 0
    begun: float = field(default_factory=time.time)

    def text(self) -> str:
        """For example "fitting layer 7 of 32", "writing: 1.2 GB of 5.0 GB" or "reading"."""
        if not self.total:
            return self.name
        if self.unit == "B":
            return f"{self.name}: {bytes_text(self.done)} of {bytes_text(self.total)}"
        return f"{self.name} {self.unit} {min(self.done + 1, self.total)} of {self.total}"


class _Display:
    """The open stages of the process. Steps may come from any thread."""

    def __init__(self) -> None:
        self._stages: list[Stage] = []
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._bar: Any = None
        self._drawn = 0.0
        self._begun = self._closed = self._said = 0.0  # of the command: its first stage, its last one, its last line

    def begin(self) -> None:
        """A command begins: its lines count from here."""
        with self._lock:
            self._begun = self._said = self._closed = time.time()

    @contextmanager
    def show(self, stage: Stage) -> Iterator[Callable[[int], None]]:
        with self._lock:
            if not self._stages:
                if time.time() - self._closed > EVERY:  # else the next stage of the same command, or call from Python
                    self.begin()
                self._ended = threading.Event()
                threading.Thread(target=self._beat, args=[self._ended], daemon=True).start()
            self._stages.append(stage)
            self._draw()
        try:
            yield lambda amount: self._advance(stage, amount)
        finally:
            with self._lock:
                self._stages.remove(stage)
                self._draw()
                if not self._stages:
                    self._closed = time.time()
                    self._ended.set()

    def text(self) -> str:
        """The innermost stage, after those around it that are counted; bytes that are copied beside it are left out."""
        *outer, inner = self._stages
        return ", ".join([*(each.text() for each in outer if each.total and each.unit != "B"), inner.text()])

    def _advance(self, stage: Stage, amount: int) -> None:
        with self._lock:
            stage.done += amount
            if self._stages and stage is self._stages[-1] and time.monotonic() - self._drawn >= _LEAST:
                self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if not self._stages or not sys.stderr.isatty():
            if self._bar is not None:
                self._bar.close()
                self._bar = None
            return
        from tqdm import tqdm

        if self._bar is None:
            size: dict[str, Any] = {"dynamic_ncols": True} if _knows_its_size() else _SIZE
            options: dict[str, Any] = {"leave": False, "smoothing": 0, "bar_format": _NO_BAR, **size}
            self._bar = tqdm(file=sys.stderr, desc=self.text(), **options)
        stage = self._stages[-1]
        self._bar.total, self._bar.n, self._bar.initial = stage.total or None, stage.done, stage.kept
        self._bar.start_t, self._bar.bar_format = stage.begun, _BAR if stage.total else _NO_BAR
        self._bar.set_description_str(self.text())

    def _beat(self, ended: threading.Event) -> None:
        """Until the last stage ends: refresh the bar, or print a line."""
        while not ended.wait(_REDRAWN if sys.stderr.isatty() else max(0.0, self._said + EVERY - time.time())):
            with self._lock:
                if self._stages and self._bar is not None:
                    self._draw()
                elif self._stages:
                    self._said = time.time()
                    minutes, seconds = divmod(int(self._said - self._begun), 60)
                    print(f"[{minutes}:{seconds:02}] {self.text()}", file=sys.stderr, flush=True)


def _knows_its_size() -> bool:
    """Whether the terminal at stderr does: one that was never told has 0 columns or 0 lines."""
    try:
        return all(os.get_terminal_size(sys.stderr.fileno()))
    except (OSError, ValueError):
        return False


_DISPLAY = _Display()


def begin() -> None:
    """A command begins: lines that say what it does count its time."""
    _DISPLAY.begin()


@contextmanager
def stage(name: str, total: int = 0, unit: str = "", done: int = 0) -> Iterator[Callable[[int], None]]:
    """A stage of ``total`` of ``unit`` ("B" is bytes), ``done`` of them already; call it with the amount of each step.

    Shown on stderr: as the bar on a terminal, elsewhere as a line every ``EVERY`` seconds.
    """
    with _DISPLAY.show(Stage(name, total, unit, done, done)) as advance:
        yield advance
