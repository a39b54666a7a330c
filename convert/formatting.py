"""Bytes, tokens and durations as text, and back; tables, labeled lines and commands that fit the
terminal; numbers that JSON can hold.
"""

import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from kvfold.convert.errors import escape_text

_COLUMNS = 100
_LABEL = 9
_NARROWEST = 20  # characters: columns of figures are never wrapped
_JOINED = "\N{NO-BREAK SPACE}"  # textwrap does not break a line there
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


def format_count(count: int, unit: str) -> str:
    """``count`` with its unit in the singular or plural, such as "1 thread"."""
    return f"{count} {unit}{'s' * (count != 1)}"


def count_columns() -> int:
    """The columns of the terminal, at most 100; 100 if the output is no terminal."""
    return min(_COLUMNS, shutil.get_terminal_size((_COLUMNS, 24)).columns)


def wrap_text(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` characters. An option stays beside its value, and
    words that are longer, such as paths, stay whole.
    """
    joined = re.sub(r"(--[\w-]+) (?!-)", rf"\1{_JOINED}", text)
    lines = textwrap.wrap(joined, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_JOINED, " ") for line in lines]


def format_labeled_rows(rows: Iterable[tuple[str, str]], next_command: Sequence[str] = ()) -> str:
    """Rows of ``(label, text)`` as aligned lines that fit the terminal; below them ``next_command``
    on lines of its own, to copy into a shell. Rows without text are left out.
    """
    width = count_columns() - _LABEL
    lines = []
    for label, text in rows:
        for line in wrap_text(escape_text(text), width):
            lines.append(f"{label:<{_LABEL}}{line}")
            label = ""
    if next_command:
        words = [shlex.quote(word).replace(" ", _JOINED) for word in next_command]
        # Two columns each for the indentation and for the backslash.
        command = wrap_text(" ".join(words), count_columns() - 4)
        lines += ["next", "  " + " \\\n  ".join(command)]
    return "\n".join(lines)


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table that fits the terminal, its first column left-aligned, the others
    right-aligned. Where it would be too wide, the cells of its widest columns wrap.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > count_columns() and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in rows:
        wrapped = [wrap_text(cell, width) for cell, width in zip(row, widths, strict=True)]
        for cells in zip_longest(*wrapped, fillvalue=""):
            aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
            aligned[0] = cells[0].ljust(widths[0])
            lines.append("  ".join(aligned).rstrip())
    return lines


def to_json_values(value: Any) -> Any:
    """``value`` with NaN and infinity replaced by None, because JSON has neither."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)
