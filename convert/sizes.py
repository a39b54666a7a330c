"""Bytes, tokens and durations as text; rows of cells formatted as a table; numbers that JSON can
hold.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

_DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BY_NAME = {"": 1} | {unit.upper(): size for unit, size in (_DECIMAL | _BINARY).items()}
# Least size without a unit, in bytes. A smaller number probably means gigabytes.
_LEAST_BARE = 1000


def bytes_text(count: int) -> str:
    """``count`` bytes in the largest decimal unit that gives a number of at least 1, such as "5.2
    GB".
    """
    unit, size = bytes_unit(count)
    return f"{count} B" if size == 1 else f"{count / size:.1f} {unit}"


def bytes_unit(count: float) -> tuple[str, int]:
    """The largest decimal unit that is at most ``count`` bytes, and its size in bytes."""
    return next(
        ((unit, size) for unit, size in reversed(_DECIMAL.items()) if count >= size), ("B", 1)
    )


def parse_size(text: str | int) -> int | None:
    """Bytes in a size such as ``"5GB"`` (decimal, as in transformers), ``"500MiB"`` or ``1000``;
    None if invalid.
    """
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", str(text), re.ASCII)
    if match is None or match[2].upper() not in _BY_NAME:
        return None
    return int(float(match[1]) * _BY_NAME[match[2].upper()]) or None


def size_expected(value: Any) -> str | None:
    """The rule that ``value`` breaks as a file size, worded to follow "must be"; None for a valid
    size.
    """
    if (
        isinstance(value, str)
        and re.fullmatch("[0-9]{1,9}", value.strip())
        and 0 < int(value) < _LEAST_BARE
    ):
        return f"a size with its unit (did you mean {value.strip()}GB?)"
    return None if parse_size(value) else "a size such as 5GB, 500MB or 2GiB"


def tokens_of(text: str | int) -> int | None:
    """The number of tokens in a string such as ``"200k"``, ``"1M"`` or ``"1.5G"``; None for all
    else.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kKmMgG])", str(text), re.ASCII)
    return None if match is None else int(float(match[1]) * _BY_NAME[f"{match[2].upper()}B"])


def tokens_text(count: int) -> str:
    """``count`` tokens as `tokens_of` reads them, to three digits: "200k", "1.02M"."""
    unit, size = ("M", 10**6) if count >= 10**6 else ("k", 10**3)
    return f"{count / size:.3g}{unit}"


def duration(seconds: float) -> str:
    """A rough duration: "7 s", "12 min", "3 h", "4 days"."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def table(
    rows: Sequence[Sequence[str]], least: Sequence[int] = (), left: Sequence[int] = (0,)
) -> list[str]:
    """Lines of a table with the columns ``left`` left-aligned, the others right-aligned; ``least``
    has minimum widths.

    In a row with fewer cells than the first row, the last cell may be a sentence and does not widen
    its column.
    """
    whole = len(rows[0])
    columns = zip_longest(*(row if len(row) == whole else row[:-1] for row in rows), fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    widths = [max(pair) for pair in zip_longest(widths, least, fillvalue=0)]
    lines = []
    for row in rows:
        aligned = [cell.ljust if i in left else cell.rjust for i, cell in enumerate(row)]
        cells = [align(width) for align, width in zip(aligned, widths, strict=False)]
        if len(row) < whole:
            cells[-1:] = row[-1:]
        lines.append("  ".join(cells).rstrip())
    return lines


def jsonable(value: Any) -> Any:
    """``value`` with null for NaN and infinity, such as the loss of a source that overflows: JSON
    has neither.
    """
    if isinstance(value, Mapping):
        return {name: jsonable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
