"""Progress on stderr: there when a person watches, silent otherwise."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
