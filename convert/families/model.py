"""Model families as data: what a config and a checkpoint of a model type hold, asked by name.

Nothing here imports torch or transformers: ``kvfold inspect`` answers from headers and a config in under a second.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from kvfold.convert.errors import InputError
from kvfold.convert.families.expressions import evaluate
from kvfold.convert.families.names import attention_names, attention_shapes, kv_config
from kvfold.convert.families.rope import number_above_0, rope_table, rotary_dims
from kvfold.convert.families.schema import FamilySpec, TensorSpec, read_family
from kvfold.convert.families.values import TYPES, Values

__all__ = [
    "Block",
    "Family",
    "Geometry",
    "Layer",
    "attention_names",
    "family_of",
    "kv_config",
    "load_family",
    "supported",
    "tensor_problems",
]

_FOLDER = Path(__file__).parent
_TOWERS = re.compile(r"(text|vision|audio|speech|image|video|decoder|encoder|thinker|talker|llm)_config$")
_LAYER_TYPES = (None, "full_attention", "sliding_attention")


class HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Geometry:
    """``H, G, D, E`` of every layer, the number of layers, and how many dims of a head rotate."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    model_dim: int
    rotary_dims: int
    vocabulary: int
    positions: int  # longest context the model is made for
    initializer_range: float


@dataclass(frozen=True)
class Layer:
    """How one layer attends. ``scale`` multiplies q . k; ``window`` is how many positions back a query sees, None: all.

    ``softcap`` c turns scores s into ``c tanh(s / c)``; ``clip`` bounds q, k and v elements after projection (olmo).
    """

    index: int
    type: str | None
    scale: float
    window: int | None
    rotates: bool
    softcap: float | None
    clip: float | None
    causal: bool
    sparse: bool  # a mixture of experts instead of one MLP


@dataclass(frozen=True)
class Block:
    """What surrounds the attention.

    ``order``: ``pre`` x + f(norm(x)); ``post`` x + norm(f(x)); ``sandwich`` both; ``parallel`` x + attention(n) +
    mlp(n) with one n = norm(x). ``mlp``: ``gated``, ``gated_fused`` (gate and up in one tensor) or ``plain``. The gain
    of a norm is weight + ``norm_offset``. ``residual_scale`` multiplies what each sublayer adds.
    """

    norm: Literal["rms", "layer"]
    norm_eps: float
    norm_offset: float
    norm_bias: bool
    norm_weight: bool
    activation: str
    mlp: Literal["gated", "gated_fused", "plain"]
    order: str
    sparse: bool  # any layer with experts
    residual_scale: float
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None
    tied: bool


@dataclass(frozen=True)
class Family:
    """One model type. Every method takes the decoded config.json and raises ``InputError`` naming a bad key."""

    spec: FamilySpec

    @property
    def model_type(self) -> str:
        return self.spec.model_type

    @property
    def architecture(self) -> str:
        return self.spec.architecture

    @property
    def accepts_fewer_kv_heads(self) -> bool:
        """Whether the stock class takes a number of key/value heads below the number of query heads."""
        return self.spec.accepts_fewer_kv_heads

    def values(self, config: Mapping[str, Any]) -> Values:
        """The config's values by the names of the family file, defaults of the class filled in, checked when read."""
        return Values(self.spec, config)

    def check_values(self, config: Mapping[str, Any]) -> None:
        """Raises ``InputError`` for a present value of the wrong type, whether or not this config uses it."""
        values = self.values(config)
        for name in self.spec.config:
            if config.get(values.spelling(name)) is not None:
                values[name]
        for layer_type in self.spec.rotary.by_type or ():
            rope_table(self, config, layer_type)
        for index in range(evaluate(self.spec.sizes.layers, values)):
            self.layer(config, index)

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """Raises ``InputError`` when the heads do not divide as attention needs."""
        values, sizes = self.values(config), self.spec.sizes
        kv_heads, heads = values[sizes.kv_heads], evaluate(sizes.heads, values)
        if heads % kv_heads:
            raise InputError(
                f"config.json: {sizes.kv_heads} is {kv_heads}, which does not divide the {heads} query heads; "
                "a divisor was expected"
            )
        return Geometry(
            layers=evaluate(sizes.layers, values),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=evaluate(sizes.head_dim, values),
            model_dim=evaluate(sizes.model_dim, values),
            rotary_dims=rotary_dims(self, config),
            vocabulary=evaluate(sizes.vocabulary, values),
            positions=evaluate(sizes.positions, values),
            initializer_range=evaluate(sizes.initializer_range, values),
        )

    def layer(self, config: Mapping[str, Any], index: int) -> Layer:
        """How layer ``index`` attends."""
        values, attention = self.layer_values(config, index), self.spec.attention
        try:
            scale = evaluate(attention.scale, values)
        except ZeroDivisionError:
            scale = math.inf
        if not number_above_0(scale):
            raise InputError(f"config.json: the scale of scores, {attention.scale}, must be above 0, found {scale!r}")
        return Layer(
            index=index,
            type=values["layer_type"],
            scale=float(scale),
            window=evaluate(attention.window, values),
            rotates=bool(evaluate(self.spec.rotary.rotates, values)),
            softcap=evaluate(attention.softcap, values),
            clip=evaluate(attention.clip, values),
            causal=bool(evaluate(attention.causal, values)),
            sparse=values["sparse"],
        )

    def layer_values(self, config: Mapping[str, Any], index: int) -> Values:
        """``values`` with ``layer``, ``layer_type`` and ``sparse`` (experts instead of one MLP) added."""
        values = self.values(config).with_names(layer=index)
        layer_type = evaluate(self.spec.attention.layer_type, values)
        if layer_type not in _LAYER_TYPES:
            raise InputError(
                f"config.json: layer {index} is {layer_type!r}; model_type {self.model_type!r} is supported with "
                "'full_attention' and 'sliding_attention'"
            )
        return values.with_names(layer_type=layer_type, sparse=bool(evaluate(self.spec.block.sparse, values)))

    def kv_config(self, config: Mapping[str, Any], kv_heads: int) -> dict[str, int]:
        """The config keys that change for ``kv_heads`` key/value heads."""
        return kv_config(self, config, kv_heads)

    def block(self, config: Mapping[str, Any]) -> Block:
        """What surrounds the attention, for a target that must express it in another class."""
        values, block = self.values(config), self.spec.block
        layers = range(evaluate(self.spec.sizes.layers, values))
        return Block(
            norm=block.norm,
            norm_eps=float(evaluate(block.norm_eps, values)),
            norm_offset=block.norm_offset,
            norm_bias=block.norm_bias,
            norm_weight=block.norm_weight,
            activation=evaluate(block.activation, values),
            mlp=block.mlp,
            order=evaluate(block.order, values),
            sparse=any(evaluate(block.sparse, values.with_names(layer=index)) for index in layers),
            residual_scale=float(evaluate(block.residual_scale, values)),
            embedding_scale=float(evaluate(block.embedding_scale, values)),
            logit_scale=float(evaluate(block.logit_scale, values)),
            logit_softcap=evaluate(block.logit_softcap, values),
            tied=bool(evaluate(block.tied, values)),
        )

    def expected_tensors(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint of this config holds, in the terms of its files."""
        expected: dict[str, tuple[int, ...]] = {}
        for scope, tensor in self._present(config):
            shape = tuple(int(evaluate(size, scope)) for size in tensor.shape)
            count = 1 if tensor.each is None else evaluate(tensor.each, scope)
            for expert in range(count):
                expected[_fill(tensor.name, scope, expert)] = shape
        for index in range(self.geometry(config).layers):
            expected.update(attention_shapes(self, config, index))
        return expected

    def most_experts(self, config: Mapping[str, Any]) -> int:
        """The largest number of experts in a layer; 1 in a model without."""
        return max(
            1 if tensor.each is None else evaluate(tensor.each, scope) for scope, tensor in self._present(config)
        )

    def tensor_names(self, config: Mapping[str, Any]) -> dict[tuple[str, int | None], tuple[str, ...]]:
        """The names of the tensors outside the attention by (role, layer); layer is None for those of the whole model.

        Roles of experts hold one name per expert. A role whose tensor this config does not have is absent.
        """
        found: dict[tuple[str, int | None], tuple[str, ...]] = {}
        for scope, tensor in self._present(config):
            layer = scope["layer"] if "{layer}" in tensor.name else None
            count = 1 if tensor.each is None else evaluate(tensor.each, scope)
            found[tensor.role, layer] = tuple(_fill(tensor.name, scope, expert) for expert in range(count))
        return found

    def tolerates(self, config: Mapping[str, Any], name: str) -> bool:
        """Whether a tensor called ``name`` may be in the files although the class does not read it."""
        values = self.values(config)
        patterns = (item.name for item in self.spec.tolerated if evaluate(item.when, values))
        return any(re.fullmatch(re.escape(pattern).replace(r"\{layer\}", r"\d+"), name) for pattern in patterns)

    def _present(self, config: Mapping[str, Any]) -> Iterator[tuple[Values, TensorSpec]]:
        whole = self.values(config)
        layers = [self.layer_values(config, index) for index in range(self.geometry(config).layers)]
        for tensor in self.spec.tensors:
            for scope in layers if "{layer}" in tensor.name else [whole]:
                if evaluate(tensor.when, scope):
                    yield scope, tensor


def _fill(name: str, scope: Values, expert: int) -> str:
    return name.replace("{layer}", str(scope.get("layer"))).replace("{expert}", str(expert))


def supported() -> list[str]:
    """The model types that have a family file, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


@lru_cache
def load_family(name: str) -> Family:
    """The family called ``name``, which must be one of ``supported()``."""
    return Family(read_family(_FOLDER / f"{name}.json"))


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a decoded config.json, by its ``model_type``. Raises ``InputError`` when it is not supported."""
    model_type = config.get("model_type")
    known = ", ".join(supported())
    if towers := sorted(key for key in config if _TOWERS.search(key) and config[key] is not None):
        raise InputError(
            f"config.json: model_type {model_type!r} is not supported: it wraps a language model "
            f"({', '.join(towers)}); expected a plain decoder of one of: {known}"
        )
    if model_type not in supported():
        raise InputError(f"config.json: model_type {model_type!r} is not supported; expected one of: {known}")
    family = load_family(model_type)
    architectures = config.get("architectures")
    if architectures is not None and not TYPES["texts"][1](architectures):
        raise InputError(f"config.json: architectures must be {TYPES['texts'][0]}, found {architectures!r}")
    if architectures and family.architecture.casefold() not in {item.casefold() for item in architectures}:
        raise InputError(
            f"config.json: architectures is {architectures!r}; for model_type {model_type!r} "
            f"{family.architecture} was expected: other heads are not supported"
        )
    return family


def tensor_problems(family: Family, config: Mapping[str, Any], tensors: Mapping[str, HasShape]) -> list[str]:
    """What is wrong with the names and shapes of a checkpoint's tensors, one line each: missing, mis-shaped, extra."""
    layers = family.geometry(config).layers
    if layers > max(len(tensors), 4096):  # said before thousands of layers are listed one by one
        return [f"missing: config.json tells of {layers} layers, the files hold {len(tensors)} tensors in all"]
    experts = family.most_experts(config)
    if experts > max(len(tensors), 4096):
        return [f"missing: config.json tells of {experts} experts, the files hold {len(tensors)} tensors in all"]
    expected = family.expected_tensors(config)
    missing = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    misshaped = [
        f"wrong shape: {name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    extra = [
        f"unexpected: {name} {list(tensors[name].shape)}"
        for name in tensors
        if name not in expected and not family.tolerates(config, name)
    ]
    return missing + misshaped + extra
