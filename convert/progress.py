"""Progress on stderr: one tqdm bar on a terminal, elsewhere a line for every stage that lasts, and one every 30 s.

Stages nest (refining step 40 of 150 while fitting layer 7 of 32): the innermost has the bar, the others are named in
front of it. Time left is measured by the run itself.
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

# Where stderr is no terminal, in seconds: between lines, how long a stage lasts before it is named, between looks.
EVERY, LASTS, TICK = 30.0, 2.0, 0.5
# The name of a stage on stderr, before its unit: "fitting layer 7 of 32".
_SHOWN = {
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


@dataclass
class Stages:
    """The stages of a run: ``with stages("convert", 32, "layer") as advance: advance(1)``.

    Each step goes to ``progress`` if the caller gave one, else to stderr (nothing with ``quiet``). A stage without
    ``total`` has no known length; ``progress`` does not hear of it.
    """

    progress: Progress | None = None
    quiet: bool = False

    @contextmanager
    def __call__(self, name: str, total: int = 0, unit: str = "", done: int = 0) -> Iterator[Advance]:
        """A stage of ``total`` units ("B" is bytes), ``done`` of them before it began."""
        progress, count = self.progress, done

        def report(amount: int) -> None:
            nonlocal count
            # A thread copies bytes while layers are fitted.
            with _lock:
                count += amount
                if progress is not None and total:
                    progress(name, count, total)

        if progress is None and not self.quiet:
            with stage(_SHOWN.get(name, name), total, unit, done) as advance:
                yield advance
        else:
            report(0)
            yield report

    def over(self, name: str, items: Iterable[Item], total: int, unit: str, done: int = 0) -> Iterator[Item]:
        """``items``, each a unit of the stage."""
        with self(name, total, unit, done) as advance:
            for item in items:
                yield item
                advance(1)


@dataclass(eq=False)
class _Stage:
    name: str
    total: int
    unit: str
    kept: int  # done before it began
    done: int
    begun: float = field(default_factory=time.time)

    def text(self) -> str:
        """For example "fitting layer 7 of 32 (12:40 left)", "writing: 1.2 GB of 5.0 GB" or "reading"."""
        if not self.total:
            return self.name
        counted = f" {self.unit} {min(self.done + 1, self.total)} of {self.total}"
        if self.unit == "B":
            counted = f": {bytes_text(self.done)} of {bytes_text(self.total)}"
        made = self.done - self.kept
        # The first layer or step warms up.
        if made < 2:
            return self.name + counted
        from tqdm import tqdm

        left = (time.time() - self.begun) / made * (self.total - self.done)
        return f"{self.name}{counted} ({tqdm.format_interval(left)} left)"


_lock = threading.RLock()
_open: list[_Stage] = []  # outermost first
_bar: Any = None  # of the innermost
_watching = False
# The last line and the outermost stage that it named: many short stages have a line now and then too.
_told, _named = time.time(), ""


@contextmanager
def stage(name: str, total: int = 0, unit: str = "", done: int = 0) -> Iterator[Advance]:
    """A stage on stderr; call it with the amount of each step, from any thread."""
    this = _Stage(name, total, unit, done, done)

    def advance(amount: int) -> None:
        with _lock:
            this.done += amount
            if _bar is not None and _open[-1:] == [this]:
                _bar.update(amount)

    with _lock:
        _open.append(this)
        _show()
    try:
        yield advance
    finally:
        with _lock:
            _open.remove(this)
            _show()


def _show() -> None:
    """Replace the bar by one of the innermost stage; without a terminal have a thread print lines."""
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
    # The stage may go on after a nested one ended.
    _bar.n, _bar.start_t = this.done, this.begun
    _bar.refresh()


def _watch() -> None:
    """Print a line for each outermost stage that lasts, and one every `EVERY` seconds, until no stage is open."""
    global _told, _named, _watching
    # A thread, because some stages take minutes from one step to the next, or have none.
    while True:
        time.sleep(TICK)
        with _lock:
            if not _open:
                _watching, _named = False, ""
                return
            now, outer = time.time(), _open[0]
            if now - _told >= EVERY or (outer.name != _named and now - outer.begun >= LASTS):
                _told, _named = now, outer.name
                print(f"[{time.strftime('%H:%M:%S')}] {_line(_open[-1].text())}", file=sys.stderr, flush=True)


def _line(text: str) -> str:
    """``text`` of the innermost stage behind the counted ones around it."""
    # Bytes are copied at the same time, and are no part of what a step is doing.
    around = [each.text() for each in _open[:-1] if each.total and each.unit != "B"]
    return ", ".join([*around, text])


def _has_width() -> bool:
    """True if stderr is a terminal that knows its size; tqdm draws nothing on one with 0 columns."""
    try:
        return sys.stderr.isatty() and all(os.get_terminal_size(sys.stderr.fileno()))
    except (OSError, ValueError):
        return False
