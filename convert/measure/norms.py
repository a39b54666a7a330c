"""What a conversion measured of norms on queries and keys, out of the ``kvfold.json`` beside its result."""

import math
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.folder import RECORD, json_beside

_MEASURED = ("query_spread", "key_spread", "query_missed", "key_missed")

Range = tuple[float, float, float]


def norm_ranges(folder: Path) -> dict[str, Range] | None:
    """Of the divisors of queries and keys: their spread, and the energy that linear maps miss; shares of 1.

    Each as (least, mean, greatest) of the layers. None without a record, or where it says nothing of norms: facts of a
    checkpoint must not fail by a file beside it.
    """
    found = json_beside(folder, RECORD).get("head_norms")
    layers = [layer for layer in found if _is_measured(layer)] if isinstance(found, list) else []
    if not layers:
        return None
    columns = {name: [layer[name] for layer in layers] for name in _MEASURED}
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
    """Whether ``layer`` has every number as kvfold writes them."""
    if not isinstance(layer, dict):
        return False
    return all(isinstance(value := layer.get(name), float) and math.isfinite(value) for name in _MEASURED)
