"""The rotary embedding that a config describes, in both spellings, without computing it.

transformers 5 writes ``rope_parameters`` (one table, or one per layer type); before it were ``rope_theta``,
``rope_scaling`` and ``partial_rotary_factor``. The rules of precedence are those of transformers' configs.
"""

import math
from collections.abc import Mapping
from typing import Any

from kvfold.convert.errors import InputError
from kvfold.convert.families.expressions import evaluate, names
from kvfold.convert.families.values import Values

_SCALED_BY_LENGTH = ("llama3", "yarn", "longrope")


def rope_table(values: Values, layer_type: str | None = None) -> dict[str, Any]:
    """The rope parameters of a layer type as transformers 5 spells them: always ``rope_type`` and ``rope_theta``.

    Types that a family's class reads as another are renamed. Raises ``InputError`` for a table of the wrong kind.
    """
    rotary = values.family.rotary
    table = _stated_table(values, layer_type)
    table["rope_type"] = table.get("rope_type") or table.get("type") or "default"
    if not isinstance(table["rope_type"], str):
        raise InputError(f"config.json: rope_type must be a string, found {table['rope_type']!r}")
    table["rope_type"] = (rotary.renamed or {}).get(table["rope_type"], table["rope_type"])
    checked_number(table, "rope_theta")
    _default_original_positions(values, table)
    return table


def older_rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """What ``config`` lacks for readers from before transformers 5, where it has one table in ``rope_parameters``.

    Empty where it has the older spelling, or a table for each layer type. Nothing changes for transformers 5.
    """
    table = config.get("rope_parameters")
    older = config.get("rope_theta") is not None or config.get("rope_scaling")
    if older or not isinstance(table, Mapping) or "rope_theta" not in table:
        return {}
    kind = table.get("rope_type") or "default"
    scaling = {name: value for name, value in table.items() if name != "rope_theta"}
    part = {"partial_rotary_factor": table["partial_rotary_factor"]} if "partial_rotary_factor" in table else {}
    return {
        "rope_theta": table["rope_theta"],
        **{name: value for name, value in part.items() if name not in config},
        **({} if kind == "default" else {"rope_scaling": {**scaling, "type": kind}}),
    }


def number_above_0(value: Any) -> bool:
    """Whether ``value`` is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def checked_number(table: Mapping[str, Any], key: str) -> float:
    """``table[key]`` of a rotary embedding. Raises ``InputError`` unless it is a number above 0."""
    value = table.get(key)
    if not number_above_0(value):
        raise InputError(f"config.json: {key} of the rotary embedding must be a number above 0, found {value!r}")
    return float(table[key])


def _stated_table(values: Values, layer_type: str | None) -> dict[str, Any]:
    """The parameters as the config has them, ``rope_scaling`` before ``rope_parameters``, with the class's base."""
    rotary, config = values.family.rotary, values.config
    theta, part = ((rotary.keys or {}).get(key, key) for key in ("rope_theta", "partial_rotary_factor"))
    new, old = _mapping(config, "rope_parameters"), _mapping(config, "rope_scaling")
    of_type = (rotary.by_type or {}).get(layer_type or "")
    if of_type is None:
        table = {**(old or new or rotary.table or {})}
        table.setdefault("rope_theta", config.get(theta) or rotary.theta)
        if config.get(part) is not None:
            table.setdefault("partial_rotary_factor", config[part])
        return table
    table = {**_mapping(new, layer_type or "")}
    if of_type.scaled:
        table.update(old)
    table.setdefault("rope_theta", (of_type.key and config.get(of_type.key)) or of_type.theta)
    return table


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise InputError(f"config.json: {key} must be an object or null, found {value!r}")
    return value or {}


def _default_original_positions(values: Values, table: dict[str, Any]) -> None:
    """The class's key wins over the table's; without either it is the present maximum."""
    key = "original_max_position_embeddings"
    if table["rope_type"] not in _SCALED_BY_LENGTH:
        return
    if (positions := values.config.get(key, values.family.rotary.original_positions)) is not None:
        table[key] = positions
    table.setdefault(key, evaluate(values.family.sizes.positions, values))


def query_growth(values: Values, layer_type: str | None) -> float:
    """``growth`` of ``Layer``, which stands among the rope parameters; 0 for classes without it."""
    key = values.family.rotary.query_growth
    table = {} if key is None else rope_table(values, layer_type)
    return checked_number(table, key) if key is not None and table.get(key) else 0.0


def rotary_fraction(values: Values, table: Mapping[str, Any]) -> float:
    """The part of a head that rotates, in (0, 1]."""
    default = values.family.rotary.fraction
    if default is None:
        return 1.0
    fraction = table.get("partial_rotary_factor", default)
    if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction <= 1:
        raise InputError(f"config.json: partial_rotary_factor must be a number above 0 and up to 1, found {fraction!r}")
    return float(fraction)


def rotary_dims(values: Values) -> int:
    """``D_rot``, the same in every layer that rotates; 0 without a rotary embedding."""
    rotary = values.family.rotary
    if not names(rotary.rotates) & {"layer", "layer_type"} and not evaluate(rotary.rotates, values):
        return 0
    head_dim = evaluate(values.family.sizes.head_dim, values)
    if rotary.dims is None:
        dims = int(head_dim * rotary_fraction(values, rope_table(values)))
    else:
        dims = int(evaluate(rotary.dims, values))
    if dims % 2 or not dims:
        raise InputError(
            f"config.json: {dims} of {head_dim} dims of a head rotate; an even number above 0 was expected "
            "(head_dim, partial_rotary_factor)"
        )
    return dims
