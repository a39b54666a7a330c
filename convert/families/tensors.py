"""The tensors that a checkpoint of a family holds: name, shape and what each is for, from the values of its config."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvfold.convert.families.expressions import evaluate
from kvfold.convert.families.geometry import Geometry
from kvfold.convert.families.schema import Attention, Norm, TensorSpec
from kvfold.convert.families.values import Values

Role = Literal["q", "k", "v", "o"]
ROLES: tuple[Role, ...] = ("q", "k", "v", "o")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the files. ``layer`` is None for those of the whole model.

    ``roles`` outside the attention is the one of the family file. In the attention it says which of q, k, v and o the
    tensor is a weight, bias or norm of: a fused projection has three. Sinks belong to the queries.
    """

    name: str
    roles: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]


def block_tensors(values: Values, layers: Sequence[Values]) -> Iterator[StoredTensor]:
    """The tensors outside the attention, in the order of the family file; ``layers`` are the values of each layer."""
    for role, spec, scope in present(values, layers):
        shape = tuple(int(evaluate(size, scope)) for size in spec.shape)
        layer = scope["layer"] if _per_layer(spec) else None
        name = spec.name.replace("{layer}", str(layer))
        for expert in range(experts(spec, scope)):
            yield StoredTensor(name.replace("{expert}", str(expert)), (role,), layer, shape)


def present(values: Values, layers: Sequence[Values]) -> Iterator[tuple[str, TensorSpec, Values]]:
    """Role and row of the family file of what this config has, once per layer where the row names one."""
    for role, spec in values.family.tensors.items():
        for scope in layers if _per_layer(spec) else (values,):
            if evaluate(spec.when, scope):
                yield role, spec, scope


def experts(spec: TensorSpec, scope: Values) -> int:
    """The number of tensors in one layer that a row of the family file stands for."""
    return 1 if spec.each is None else int(evaluate(spec.each, scope))


def _per_layer(spec: TensorSpec) -> bool:
    return "{layer}" in spec.name


def attention_tensors(values: Values, geometry: Geometry, layer: int) -> Iterator[StoredTensor]:
    """The attention tensors of ``layer``: every projection's weight and bias, sinks, the norms of queries and keys."""
    attention, norm = values.family.attention, active_norm(values)
    module = attention.place(layer)
    for role, name in projections(attention).items():
        sides = _sides(role, geometry)
        roles = ("q", "k", "v") if role == "qkv" else (role,)
        yield StoredTensor(f"{module}.{name}.weight", roles, layer, sides[::-1] if attention.transposed else sides)
        if has_bias(values, role):
            yield StoredTensor(f"{module}.{name}.bias", roles, layer, sides[:1])
    if attention.sinks is not None:
        yield StoredTensor(f"{module}.{attention.sinks}", ("q",), layer, (geometry.heads,))
    if norm is None:
        return
    for role, heads in (("q", geometry.heads), ("k", geometry.kv_heads)):
        for name in norm_names(norm, role, heads):
            shape = _norm_shape(norm, heads, geometry.head_dim)
            for kind in ("weight", "bias") if norm.bias else ("weight",):
                yield StoredTensor(f"{module}.{name}.{kind}", (role,), layer, shape)


def projections(attention: Attention) -> dict[str, str]:
    """Projection names by role; ``qkv`` where the three are one tensor."""
    named = {"q": attention.q, "k": attention.k, "v": attention.v, "qkv": attention.qkv, "o": attention.o}
    return {role: name for role, name in named.items() if name is not None}


def has_bias(values: Values, role: str) -> bool:
    """Whether the projection of ``role`` (q, k, v, qkv or o) has a bias."""
    attention = values.family.attention
    return bool(evaluate(attention.o_bias if role == "o" else attention.qkv_bias, values))


def active_norm(values: Values) -> Norm | None:
    """The norm on queries and keys, when this config has it."""
    norm = values.family.attention.norm
    return norm if norm is not None and evaluate(norm.when, values) else None


def norm_names(norm: Norm, role: str, heads: int) -> list[str]:
    """The modules that hold the norm of queries (``role`` q) or keys (k), relative to the attention's."""
    name = norm.q if role == "q" else norm.k
    return [name.replace("{head}", str(head)) for head in range(heads)] if norm.extent == "per_head" else [name]


def _norm_shape(norm: Norm, heads: int, head_dim: int) -> tuple[int, ...]:
    shapes: dict[str, tuple[int, ...]] = {"head": (heads, head_dim), "flat": (heads * head_dim,)}
    return shapes.get(norm.extent, (head_dim,))


def _sides(role: str, geometry: Geometry) -> tuple[int, int]:
    """Outputs and inputs of a projection."""
    queries, keys = geometry.heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim
    outer = {"q": queries, "k": keys, "v": keys, "qkv": queries + 2 * keys}
    return (geometry.model_dim, queries) if role == "o" else (outer[role], geometry.model_dim)
