"""Progress on stderr: there when a person watches, silent otherwise."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WORTH_TELLING = 10  # seconds


@contextmanager
def bar(total: int, unit: str, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar over ``total`` of ``unit`` ("B" is scaled to kB, MB, GB), to be called with every step's amount.

    Off with ``quiet`` or when stderr is no terminal.
    """
    from tqdm import tqdm

    hidden = quiet or not sys.stderr.isatty()
    with tqdm(total=total, unit=unit, unit_scale=unit == "B", disable=hidden, file=sys.stderr, leave=False) as shown:

        def advance(amount: int) -> None:
            shown.update(amount)

        yield advance


class Pace:
    """Says once how long the layers that are left will take: from the time between the first two that were done.

    That is all of a layer's time, whatever is done to it; ``left`` counts those to do. Silent when it is next to none.
    """

    def __init__(self, left: int, quiet: bool) -> None:
        self._left, self._quiet = left, quiet
        self._last: float | None = None
        self._told = False

    def layer_done(self) -> None:
        self._left -= 1
        now, last = time.monotonic(), self._last
        self._last = now
        if last is None or self._told:
            return
        self._told = True
        seconds = (now - last) * self._left
        if seconds >= _WORTH_TELLING and not self._quiet:
            from tqdm import tqdm

            each = f"{duration(now - last)} a layer, with all that is done to it"
            tqdm.write(f"{each}: about {duration(seconds)} for the {self._left} left", file=sys.stderr)


def duration(seconds: float) -> str:
    """Seconds as a person says them: "7 s", "12 min"."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 1):.0f} s"
