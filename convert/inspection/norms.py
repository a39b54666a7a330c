"""What a conversion measured of norms on queries and keys, out of the ``kvfold.json`` beside its result."""

from pathlib import Path
from typing import Any

from kvfold.convert.errors import InputError
from kvfold.convert.io.folder import parse_json, read_bytes, resolve_member

_RECORD = "kvfold.json"
_LARGEST = 1 << 26  # bytes; a record of 100 layers has some 200 KiB
_MEASURED = ("query_spread", "key_spread", "query_missed", "key_missed")

Range = tuple[float, float, float]


def norm_ranges(folder: Path) -> dict[str, Range] | None:
    """Of the divisors of queries and keys: their spread, and the energy that linear maps miss; shares of 1.

    Each as (least, mean, greatest) of the layers. None without a record, or where it says nothing of norms: facts of a
    checkpoint must not fail by a file beside it.
    """
    try:
        record = parse_json(folder / _RECORD, read_bytes(resolve_member(folder, _RECORD), _LARGEST))
    except InputError:
        return None
    layers = [layer for layer in _list(record.get("head_norms")) if _is_measured(layer)]
    if not layers:
        return None
    columns = {name: [float(layer[name]) for layer in layers] for name in _MEASURED}
    return {name: (min(values), sum(values) / len(values), max(values)) for name, values in columns.items()}


def norm_lines(ranges: dict[str, Range]) -> list[str]:
    """The ranges for the terminal: a line of the divisors' spread, and one of what is missed."""
    shown = {name: _percent(values) for name, values in ranges.items()}
    return [
        f"divisors varied over the text by {shown['query_spread']} for queries, {shown['key_spread']} for keys",
        f"linear maps miss {shown['query_missed']} of the queries, {shown['key_missed']} of the keys",
    ]


def _percent(values: Range) -> str:
    least, mean, most = (100 * value for value in values)
    return f"{least:.1f} to {most:.1f} % (mean of layers {mean:.1f})"


def _is_measured(layer: Any) -> bool:
    return isinstance(layer, dict) and all(type(layer.get(name)) in (int, float) for name in _MEASURED)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
