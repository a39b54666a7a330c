"""Bytes, tokens, durations and tables as text, and back; numbers that JSON can hold."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_POWERS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def format_bytes(count: int) -> str:
    """``count`` bytes as text in the largest decimal unit that gives a number of at least 1, such
    as "5.2 GB".
    """
    for prefix, size in reversed(_POWERS.items()):
        if count >= size:
            return f"{count / size:.1f} {prefix}B"
    return f"{count} B"


def parse_number(text: Any, unit: str = "") -> int | None:
    """The number in a text such as ``"200k"`` or ``"1.5M"``, or with the ``unit`` B in ``"5GB"``
    (decimal); None if the text is not such a number.
    """
    number = r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?"
    match = re.fullmatch(rf"{number}([kMGT]){unit}", str(text), re.IGNORECASE | re.ASCII)
    powers = {prefix.lower(): size for prefix, size in _POWERS.items()}
    return None if match is None else int(float(match[1]) * powers[match[2].lower()])


def format_duration(seconds: float) -> str:
    """A duration in seconds as rough text: "7 s", "12 min", "3 h", "4 days"."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, its first column left-aligned, the others right-aligned.

    In a row with fewer cells than the first row, the last cell may be a sentence and does not widen
    its column.
    """
    widths = [0] * len(rows[0])
    for row in rows:
        for i, cell in enumerate(row if len(row) == len(widths) else row[:-1]):
            widths[i] = max(widths[i], len(cell))
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        if len(row) < len(widths):
            cells[-1] = row[-1]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells).rstrip())
    return lines


def to_json_values(value: Any) -> Any:
    """``value`` with NaN and infinity replaced by None, because JSON has neither."""
    if isinstance(value, Mapping):
        return {name: to_json_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
