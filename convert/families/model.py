"""A model as data: a family and a config bound together.

Nothing here imports torch or transformers: ``kvfold inspect`` answers from headers and a config in under a second.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from kvfold.convert.errors import InputError
from kvfold.convert.families import rotary
from kvfold.convert.families.family import family_of
from kvfold.convert.families.geometry import Block, Geometry, Layer, block_of, geometry_of, layer_of, layer_values
from kvfold.convert.families.schema import ABSENT, ROLES, BlockRole, Family, Norm, Role
from kvfold.convert.families.tensors import (
    StoredTensor,
    active_norm,
    attention_tensors,
    block_tensors,
    experts,
    has_bias,
    present,
)
from kvfold.convert.families.values import Values, evaluate, nested
from kvfold.convert.families.wrappers import names_in_files, text_config, text_type, wrapped_family

# Layers or experts that are listed one by one whatever the files hold. A config with a billion of them would otherwise
# take memory until the system ends the process, before anybody hears that config and files do not belong together.
_MOST_UNCHECKED = 4096


class HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, eq=False)
class Model:
    """A decoded config.json read by the rules of its family. Every property is computed once, on first use.

    Of a multimodal wrapper it is the language model: ``config`` is the inner one, and the names of all tensors of the
    language model but its head begin with ``tower``, which is None for plain models.

    Each property may raise ``InputError`` naming the config key that is missing or wrong.
    """

    family: Family
    config: Mapping[str, Any]
    tower: str | None = None

    @cached_property
    def values(self) -> Values:
        """The config's values by the names of the family file, defaults of the class filled in, checked when read."""
        return Values(self.family, self.config)

    @cached_property
    def geometry(self) -> Geometry:
        """Sizes of the model. Raises ``InputError`` when the heads do not divide as attention needs."""
        return geometry_of(self.values)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The attention of each layer."""
        return tuple(layer_of(values) for values in self._layer_values)

    @cached_property
    def block(self) -> Block:
        """The block around the attention."""
        return block_of(self.values, sparse=any(values["sparse"] for values in self._layer_values))

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor that a checkpoint of this config holds, by its name in the files."""
        listed = [*block_tensors(self.values, self._layer_values)]
        for layer in range(self.geometry.layers):
            listed += attention_tensors(self.values, self.geometry, layer)
        return {tensor.name: tensor for tensor in listed}

    @cached_property
    def names(self) -> dict[tuple[Role | BlockRole, int | None], tuple[str, ...]]:
        """The names of the tensors by (role, layer); layer is None for those of the whole model.

        A role outside the attention has one name per expert; one that this config does not have is absent. The roles q,
        k, v and o have the names of weight, bias and norm.
        """
        names: dict[tuple[Role | BlockRole, int | None], list[str]] = {}
        for tensor in self.tensors.values():
            for role in tensor.roles:
                names.setdefault((role, tensor.layer), []).append(tensor.name)
        return {key: tuple(same) for key, same in names.items()}

    @cached_property
    def qk_norm(self) -> Norm | None:
        """The norm on queries and keys, None without one."""
        return active_norm(self.values)

    @cached_property
    def _layer_values(self) -> tuple[Values, ...]:
        return tuple(layer_values(self.values, index) for index in range(self.geometry.layers))

    def has_bias(self, role: Role) -> bool:
        """True if the projection ``role`` has a bias."""
        return has_bias(self.values, role)

    def attention_names(self, layer: int, roles: Collection[Role] = ROLES) -> tuple[str, ...]:
        """The tensors of the files that hold ``roles`` of ``layer``, each once."""
        # a fused projection comes up once for each of its roles
        return tuple(dict.fromkeys(name for role in ROLES if role in roles for name in self.names[role, layer]))

    def rope_table(self, layer_type: str | None = None) -> dict[str, Any]:
        """The rope parameters of a layer type as transformers 5 spells them."""
        return rotary.rope_table(self.values, layer_type)

    def frequencies(self, layer: int, context: rotary.Context | None = None) -> rotary.Frequencies:
        """The rotary frequencies of ``layer`` in radians per position, and the amplitude of queries and keys.

        There are none where the layer does not rotate. ``context`` chooses the set of longrope. Raises ``InputError``
        for frequencies that depend on the length of the text.
        """
        how = self.layers[layer]
        return rotary.frequencies(self.values, how.type, context) if how.rotates else ([], 1.0)

    def kv_config(self, kv_heads: int) -> dict[str, int]:
        """The config keys that change for ``kv_heads`` key/value heads, in the spelling that the config uses.

        Raises ``InputError`` when the number does not divide the query heads, and ValueError for a family whose class
        has no such key.
        """
        if self.family.sizes.kv_heads is None:
            raise ValueError(f"{self.family.model_type}: expected a class that shares heads, found one that does not")
        heads = self.geometry.heads
        if kv_heads < 1 or heads % kv_heads:
            raise InputError(f"kv-heads is {kv_heads}; a divisor of the {heads} query heads was expected")
        return {self.values.spelling(self.family.sizes.kv_heads): kv_heads}

    def as_stored(self, names: Collection[str]) -> "Model":
        """The model as the files with tensors ``names`` spell it: some leave the family's prefix out."""
        prefix = self.family.prefix
        if not prefix or not names or any(name.startswith(prefix) for name in names):
            return self
        return replace(self, family=self.family.renamed(lambda name: name.removeprefix(prefix)))

    def check_values(self) -> None:
        """Raises ``InputError`` for a present value of the wrong type, whether or not this config uses it."""
        for name in self.family.config:
            if nested(self.config, self.values.spelling(name)) not in (None, ABSENT):
                self.values[name]
        for layer_type in self.family.rotary.by_type or ():
            self.rope_table(layer_type)
        _ = self.layers

    def tensor_problems(self, stored: Mapping[str, HasShape]) -> list[str]:
        """Missing, mis-shaped and unexpected tensors of a checkpoint, one line each."""
        if problem := self._size_problem(len(stored)):
            return [problem]
        missing = [f"missing: {t.name} {list(t.shape)}" for t in self.tensors.values() if t.name not in stored]
        misshaped = [
            f"wrong shape: {name} is {list(stored[name].shape)}, expected {list(tensor.shape)}"
            for name, tensor in self.tensors.items()
            if name in stored and tuple(stored[name].shape) != tensor.shape
        ]
        # Published files hold buffers that older classes stored and today's do not read (masks, inverse frequencies).
        tolerated = [
            re.escape(item.name).replace(r"\{layer\}", r"\d+")
            for item in self.family.tolerated
            if evaluate(item.when, self.values)
        ]
        # The tensors of a wrapper outside its language model are copied whatever they are.
        extra = [
            f"unexpected: {name} {list(stored[name].shape)}"
            for name in stored
            if name not in self.tensors
            and (self.tower is None or name.startswith(self.tower))
            and not any(re.fullmatch(pattern, name) for pattern in tolerated)
        ]
        return missing + misshaped + extra

    def _size_problem(self, count: int) -> str | None:
        """Reported first for a config with far more layers or experts than tensors, which listing would take long."""
        layers, most = self.geometry.layers, max(count, _MOST_UNCHECKED)
        if layers > most:
            return f"missing: config.json says {layers} layers, the files hold {count} tensors in all"
        widest = max(experts(spec, scope) for _, spec, scope in present(self.values, self._layer_values))
        if widest > most:
            return f"missing: config.json says {widest} experts, the files hold {count} tensors in all"
        return None


def model_of(config: Mapping[str, Any], names: Collection[str] = ()) -> Model:
    """The model of a decoded config.json, whose files hold tensors ``names``; of a wrapper its language model.

    The names matter for wrappers, and for families whose files leave a prefix out. Raises ``InputError`` when the
    family is not supported.
    """
    family = family_of(config)
    if text_type(config) is None:
        return Model(family, config).as_stored(names)
    within = names_in_files(names)
    return Model(wrapped_family(family, config["model_type"], within), text_config(config, names), within.tower)
