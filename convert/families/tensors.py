"""The tensors that a checkpoint of a family holds: name, shape, layer and roles, from the values of its config."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvfold.convert.families.geometry import Geometry
from kvfold.convert.families.schema import BlockRole, Norm, Role, TensorSpec
from kvfold.convert.families.values import Values, evaluate


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the files. ``layer`` is None for those of the whole model.

    In the attention ``roles`` says which of q, k, v and o the tensor is a weight, bias or norm of: a fused projection
    has three, sinks belong to the queries. Outside it has the one role of the family file.
    """

    name: str
    roles: tuple[Role | BlockRole, ...]
    layer: int | None
    shape: tuple[int, ...]


def block_tensors(values: Values, layers: Sequence[Values]) -> Iterator[StoredTensor]:
    """The tensors outside the attention, in the order of the family file; ``layers`` are the values of each layer."""
    for role, spec, scope in present(values, layers):
        shape = tuple(int(evaluate(size, scope)) for size in spec.shape)
        layer = scope["layer"] if "{layer}" in spec.name else None
        name = spec.name.replace("{layer}", str(layer))
        for expert in range(experts(spec, scope)):
            yield StoredTensor(name.replace("{expert}", str(expert)), (role,), layer, shape)


def present(values: Values, layers: Sequence[Values]) -> Iterator[tuple[BlockRole, TensorSpec, Values]]:
    """The rows of ``tensors`` that this config has, with role and values; once per layer for a row with ``{layer}``."""
    for role, spec in values.family.tensors.items():
        for scope in layers if "{layer}" in spec.name else (values,):
            if evaluate(spec.when, scope):
                yield role, spec, scope


def experts(spec: TensorSpec, scope: Values) -> int:
    """The number of tensors in one layer that a row of the family file stands for."""
    return 1 if spec.each is None else int(evaluate(spec.each, scope))


def attention_tensors(values: Values, geometry: Geometry, layer: int) -> Iterator[StoredTensor]:
    """The attention tensors of ``layer``: every projection's weight and bias, sinks, the norms of queries and keys."""
    attention, norm, size = values.family.attention, active_norm(values), geometry
    module = attention.place(layer)
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    projections: tuple[tuple[str | None, tuple[Role, ...], tuple[int, int]], ...] = (
        (attention.q, ("q",), (queries, size.model_dim)),
        (attention.k, ("k",), (keys, size.model_dim)),
        (attention.v, ("v",), (keys, size.model_dim)),
        (attention.qkv, ("q", "k", "v"), (queries + 2 * keys, size.model_dim)),
        (attention.o, ("o",), (size.model_dim, queries)),
    )
    for name, roles, shape in projections:
        if name is None:
            continue
        # A bias is no matrix: it is the same for weights that are stored the other way round.
        yield StoredTensor(f"{module}.{name}.weight", roles, layer, shape[::-1] if attention.transposed else shape)
        if has_bias(values, roles[0]):
            yield StoredTensor(f"{module}.{name}.bias", roles, layer, shape[:1])
    if attention.sinks is not None:
        yield StoredTensor(f"{module}.{attention.sinks}", ("q",), layer, (size.heads,))
    if norm is None:
        return
    sides: tuple[tuple[Role, int], ...] = (("q", size.heads), ("k", size.kv_heads))
    for role, heads in sides:
        extents = {"head": (heads, size.head_dim), "flat": (heads * size.head_dim,)}
        extent: tuple[int, ...] = extents.get(norm.extent, (size.head_dim,))
        for name in norm_names(norm, role, heads):
            for kind in ("weight", "bias") if norm.bias else ("weight",):
                yield StoredTensor(f"{module}.{name}.{kind}", (role,), layer, extent)


def has_bias(values: Values, role: Role) -> bool:
    """True if the projection ``role`` has a bias."""
    attention = values.family.attention
    return bool(evaluate(attention.o_bias if role == "o" else attention.qkv_bias, values))


def active_norm(values: Values) -> Norm | None:
    """The norm on queries and keys, None where this config has none."""
    norm = values.family.attention.norm
    return norm if norm is not None and evaluate(norm.when, values) else None


def norm_names(norm: Norm, role: Role, heads: int) -> list[str]:
    """The modules of the norm of queries (``role`` q) or keys (k), relative to the attention's."""
    name = norm.q if role == "q" else norm.k
    return [name.replace("{head}", str(head)) for head in range(heads)] if norm.extent == "per_head" else [name]
