"""Family files read: merged with those that they extend, and checked against the keys of ``schema.py``."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from kvfold.convert.families.schema import (
    Attention,
    BlockSpec,
    Family,
    Key,
    Norm,
    OwnCode,
    Rope,
    RopeOfType,
    RoutingSpec,
    Sizes,
    TensorSpec,
    Tolerated,
)

T = TypeVar("T")


def build(cls: type[T], table: Any, where: str) -> T:
    """``table`` as ``cls``. Raises ``ValueError`` naming the unknown or missing keys and the place."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: expected an object, found {table!r}")
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(table) - set(known)):
        raise ValueError(f"{where}: unknown key {', '.join(unknown)}; known: {', '.join(known)}")
    required = [name for name, item in known.items() if item.default is MISSING and item.default_factory is MISSING]
    if absent := [name for name in required if name not in table]:
        raise ValueError(f"{where}: missing key {', '.join(absent)}")
    return cls(**{name: _freeze(table[name]) for name in table})


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def read_table(path: Path, extending: tuple[str, ...] = ()) -> dict[str, Any]:
    """The family file at ``path``, decoded and merged with those it extends, which lie beside it.

    ``extending`` are the files that lead here. Raises ``ValueError`` for a circle and for a null without an entry to
    remove.
    """
    if path.name in extending:
        raise ValueError(f"{path.name}: expected no circle of extends, found {' -> '.join([*extending, path.name])}")
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "extends" not in table:
        return table
    base = read_table(path.with_name(f"{table.pop('extends')}.json"), (*extending, path.name))
    base.pop("own_code", None)  # names of classes, which no other family shares
    return base | {key: _merged(base.get(key), value, f"{path.name}: {key}") for key, value in table.items()}


def _merged(base: Any, value: Any, where: str) -> Any:
    if not isinstance(base, Mapping) or not isinstance(value, Mapping):
        return value
    if absent := [name for name, entry in value.items() if entry is None and name not in base]:
        raise ValueError(f"{where}: null removes what the extended family has, found no {', '.join(absent)} there")
    return {name: entry for name, entry in {**base, **value}.items() if entry is not None}


def parse_family(table: Any, where: str) -> Family:
    """A merged family file; ``where`` begins the message of the ``ValueError`` raised for what does not fit."""
    spec = build(Family, table, where)
    attention, rotary, block = dict(spec.attention), dict(spec.rotary), dict(spec.block)  # type: ignore[call-overload]
    if attention.get("norm") is not None:
        attention["norm"] = build(Norm, attention["norm"], f"{where}: attention.norm")
    if rotary.get("by_type") is not None:
        rotary["by_type"] = _each(RopeOfType, rotary["by_type"], f"{where}: rotary.by_type")
    if block.get("routing") is not None:
        block["routing"] = build(RoutingSpec, block["routing"], f"{where}: block.routing")
    return replace(
        spec,
        config=_each(Key, spec.config, f"{where}: config"),
        sizes=build(Sizes, spec.sizes, f"{where}: sizes"),
        attention=build(Attention, attention, f"{where}: attention"),
        rotary=build(Rope, rotary, f"{where}: rotary"),
        block=build(BlockSpec, block, f"{where}: block"),
        own_code=None if spec.own_code is None else build(OwnCode, spec.own_code, f"{where}: own_code"),
        tensors=_each(TensorSpec, spec.tensors, f"{where}: tensors"),
        tolerated=tuple(build(Tolerated, item, f"{where}: tolerated[{i}]") for i, item in enumerate(spec.tolerated)),
    )


def _each(cls: type[T], table: Mapping[str, Any], where: str) -> dict[str, T]:
    return {name: build(cls, entry, f"{where}.{name}") for name, entry in table.items()}
