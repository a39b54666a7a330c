"""Bytes, tokens, durations and tables as text, and back; numbers that JSON can hold."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZES = {unit.upper(): size for unit, size in (_DECIMAL | _BINARY).items()}
_NUMBER = r"\d{1,20}(?:\.\d{1,20})?"


def format_bytes(count: int) -> str:
    """``count`` bytes in the largest decimal unit that gives a number of at least 1, such as "5.2
    GB".
    """
    for unit, size in reversed(_DECIMAL.items()):
        if 1 < size <= count:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def parse_size(text: str | int) -> int | None:
    """Bytes in a size such as ``"5GB"`` (decimal, as in transformers), ``"500MiB"`` or ``1000``;
    None if invalid.
    """
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*", str(text), re.ASCII)
    unit = match[2].upper() or "B" if match else ""
    if match is None or unit not in _SIZES:
        return None
    return int(float(match[1]) * _SIZES[unit]) or None


SIZE_RULE = "a size with its unit, such as 5GB, 500MB or 2GiB"


def is_size(value: str | int) -> bool:
    """True for a file size; text needs a unit, because "5" probably means 5GB."""
    size = parse_size(value)
    return size is not None and (isinstance(value, int) or size >= 1000)


def parse_tokens(text: str | int) -> int | None:
    """The number of tokens in a string such as ``"200k"``, ``"1M"`` or ``"1.5G"``; None for all
    else.
    """
    match = re.fullmatch(rf"({_NUMBER})([kKmMgG])", str(text), re.ASCII)
    return None if match is None else int(float(match[1]) * _SIZES[f"{match[2].upper()}B"])


def format_tokens(count: int) -> str:
    """``count`` tokens as `parse_tokens` reads them, to three digits: "200k", "1.02M"."""
    return f"{count / 10**6:.3g}M" if count >= 10**6 else f"{count / 1000:.3g}k"


def format_duration(seconds: float) -> str:
    """A rough duration: "7 s", "12 min", "3 h", "4 days"."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def format_table(
    rows: Sequence[Sequence[str]], minimum: Sequence[int] = (), left: Sequence[int] = (0,)
) -> list[str]:
    """Lines of a table with the columns ``left`` left-aligned, the others right-aligned, in widths
    of at least ``minimum``.

    In a row with fewer cells than the first row, the last cell may be a sentence and does not widen
    its column.
    """
    columns = len(rows[0])
    widths = [*minimum, *[0] * columns][:columns]
    for row in rows:
        for i, cell in enumerate(row if len(row) == columns else row[:-1]):
            widths[i] = max(widths[i], len(cell))
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        if len(row) < columns:
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return lines


def to_json_values(value: Any) -> Any:
    """``value`` with null for NaN and infinity, such as the loss of a source that overflows: JSON
    has neither.
    """
    if isinstance(value, Mapping):
        return {name: to_json_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
