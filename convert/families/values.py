"""The values of a config.json under the names of a family file: checked when read, class defaults filled in."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvfold.convert.errors import InputError
from kvfold.convert.families.expressions import evaluate
from kvfold.convert.families.schema import ABSENT, Family, Key


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "size": ("a positive whole number", lambda value: _whole(value) and value > 0),
    "count": ("a whole number, 0 or more", lambda value: _whole(value) and value >= 0),
    "number": ("a number", _number),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a string", lambda value: isinstance(value, str)),
    "pattern": ("a whole number or a string", lambda value: isinstance(value, str) or (_whole(value) and value >= 0)),
    "counts": ("a list of whole numbers", lambda value: isinstance(value, list) and all(map(_whole, value))),
    "texts": ("a list of strings", lambda value: isinstance(value, list) and all(isinstance(i, str) for i in value)),
}


def nested(config: Mapping[str, Any], key: str) -> Any:
    """The value of ``key``, or of ``table.key`` in a table of the config; ABSENT where there is none."""
    outer, _, inner = key.partition(".")
    value = config.get(outer, ABSENT)
    if not inner or value is ABSENT:
        return value
    return value.get(inner, ABSENT) if isinstance(value, Mapping) else ABSENT


class Values(Mapping[str, Any]):
    """Read lazily, so that only the keys that a question needs have to be right; each is checked once."""

    def __init__(self, family: Family, config: Mapping[str, Any]) -> None:
        self.family, self.config = family, config
        self._names: dict[str, Any] = {}
        self._read: dict[str, Any] = {}  # shared by all scopes: what keys say does not depend on the layer

    def with_names(self, **names: Any) -> "Values":
        """The same values and a few names beside them, such as ``layer``."""
        scope = Values(self.family, self.config)
        scope._names, scope._read = {**self._names, **names}, self._read
        return scope

    def spelling(self, name: str) -> str:
        """The key under which the config holds ``name``: its own or an alias."""
        names = (name, *self.family.config[name].aliases)
        return next((key for key in names if nested(self.config, key) is not ABSENT), name)

    def __getitem__(self, name: str) -> Any:
        if name in self._names:
            return self._names[name]
        if name not in self._read:
            self._read[name] = self._checked(name)
        return self._read[name]

    def _checked(self, name: str) -> Any:
        key = self.family.config[name]
        spelling = self.spelling(name)
        value = nested(self.config, spelling)
        if value is ABSENT and key.default is not ABSENT:
            return key.default
        if value is ABSENT or value is None:
            return self._without(name, key, value)
        wanted, fits = TYPES[key.type]
        if not fits(value):
            raise InputError(f"config.json: {spelling} must be {wanted}, found {value!r}")
        if key.per_layer and len(value) != (layers := evaluate(self.family.sizes.layers, self)):
            raise InputError(
                f"config.json: {spelling} must have one entry for each of {layers} layers, found {len(value)}"
            )
        return value

    def _without(self, name: str, key: Key, value: Any) -> Any:
        if value is None and key.nullable:
            return None
        if key.otherwise is not ABSENT:
            return evaluate(key.otherwise, self)
        state = "missing" if value is ABSENT else "null"
        raise InputError(
            f"config.json: {name} is {state}; model_type {self.family.model_type!r} needs {TYPES[key.type][0]}"
        )

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from self.family.config

    def __len__(self) -> int:
        return len(self._names) + len(self.family.config)
