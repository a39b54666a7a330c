"""The values of a config.json under the names of a family file: checked when read, class defaults filled in."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvfold.convert.errors import InputError
from kvfold.convert.families.expressions import evaluate
from kvfold.convert.families.schema import ABSENT, FamilySpec, Key


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
    "counts": ("a list of whole numbers", lambda value: isinstance(value, list) and all(map(_whole, value))),
    "texts": ("a list of strings", lambda value: isinstance(value, list) and all(isinstance(i, str) for i in value)),
}


class Values(Mapping[str, Any]):
    """Read lazily, so that only the keys that a question needs have to be right."""

    def __init__(self, spec: FamilySpec, config: Mapping[str, Any], names: Mapping[str, Any] | None = None) -> None:
        self._spec = spec
        self._config = config
        self._names = dict(names or {})

    def with_names(self, **names: Any) -> "Values":
        """The same values and a few names beside them, such as ``layer``."""
        return Values(self._spec, self._config, {**self._names, **names})

    def spelling(self, name: str) -> str:
        """The key under which the config holds ``name``: its own or an alias."""
        return next((key for key in (name, *self._spec.config[name].aliases) if key in self._config), name)

    def __getitem__(self, name: str) -> Any:
        if name in self._names:
            return self._names[name]
        key = self._spec.config[name]
        spelling = self.spelling(name)
        found = self._config.get(spelling, ABSENT)
        if found is ABSENT and key.default is not ABSENT:
            return key.default
        if found is ABSENT or found is None:
            return self._without(name, key, found)
        wanted, fits = TYPES[key.type]
        if not fits(found):
            raise InputError(f"config.json: {spelling} must be {wanted}, found {found!r}")
        if key.per_layer and len(found) != (layers := evaluate(self._spec.sizes.layers, self)):
            raise InputError(
                f"config.json: {spelling} must have one entry for each of {layers} layers, found {len(found)}"
            )
        return found

    def _without(self, name: str, key: Key, found: Any) -> Any:
        if found is None and key.nullable:
            return None
        if key.otherwise is not ABSENT:
            return evaluate(key.otherwise, self)
        state = "missing" if found is ABSENT else "null"
        raise InputError(
            f"config.json: {name} is {state}; model_type {self._spec.model_type!r} needs {TYPES[key.type][0]}"
        )

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from self._spec.config

    def __len__(self) -> int:
        return len(self._names) + len(self._spec.config)
