"""The sizes of a model, the attention of each layer, and the block around it, computed from the
values of a config.
"""

import math
from dataclasses import dataclass, replace

from kvfold.convert.errors import InputError
from kvfold.convert.families.rotary import checked_number, rope_table, rotary_dims
from kvfold.convert.families.schema import Block
from kvfold.convert.families.values import Values, evaluate, evaluated, is_number


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model: layers, query heads H, key/value heads G, head dim D, width E, and
    rotary dims per head.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    model_dim: int
    rotary_dims: int
    vocabulary: int
    positions: int  # longest context that the model supports
    initializer_range: float


@dataclass(frozen=True)
class AttentionLayer:
    """The attention of one layer.

    ``scale`` multiplies q . k. ``window`` is the number of keys that a query can attend to,
    including its own; None means all. ``softcap`` c turns scores s into ``c tanh(s / c)``. ``clip``
    bounds the elements of q, k and v after projection (olmo). ``growth`` g multiplies queries at
    position t by ``1 + g log(1 + floor(t / original context))`` (Llama 4).
    """

    index: int
    type: str | None
    scale: float
    window: int | None
    rotates: bool
    softcap: float | None
    clip: float | None
    alibi: bool  # linear biases by distance
    sparse: bool  # a mixture of experts instead of one MLP
    growth: float = 0.0


def geometry_of(values: Values) -> Geometry:
    """The sizes of the model. Raises ``InputError`` unless the key/value heads divide the query
    heads.
    """
    sizes = values.family.sizes
    heads = kv_heads = evaluate(sizes.heads, values)
    if sizes.kv_heads is not None:
        kv_heads = int(values[sizes.kv_heads])
    elif sizes.own_kv_heads is not None:
        kv_heads = int(evaluate(sizes.own_kv_heads, values))
    if heads % kv_heads:
        name = sizes.kv_heads or "key/value heads"
        raise InputError(
            f"config.json: {name} is {kv_heads}, but it must divide the {heads} query heads"
        )
    names = ("layers", "head_dim", "model_dim", "vocabulary", "positions", "initializer_range")
    others = {name: evaluate(getattr(sizes, name), values) for name in names}
    return Geometry(heads=heads, kv_heads=kv_heads, rotary_dims=rotary_dims(values), **others)


def layer_values(values: Values, index: int) -> Values:
    """``values`` plus ``layer``, ``layer_type`` and ``sparse`` (experts instead of one MLP) for
    layer ``index``.
    """
    family = values.family
    try:
        layer_type = evaluate(family.attention.layer_type, replace(values, names={"layer": index}))
    except (
        TypeError
    ) as error:  # a pattern in words, which the class itself cannot read without layer_types
        raise InputError(
            f"config.json: layer_types is missing and cannot be derived ({error}); add it"
        ) from None
    if layer_type not in (None, "full_attention", "sliding_attention"):
        raise InputError(
            f"config.json: layer {index} has type {layer_type!r}, but model_type"
            f" {family.model_type!r} is supported only with 'full_attention' and"
            " 'sliding_attention'"
        )
    scope = replace(values, names={"layer": index, "layer_type": layer_type})
    return replace(
        values, names={**scope.names, "sparse": bool(evaluate(family.block.sparse, scope))}
    )


def layer_of(values: Values, index: int) -> AttentionLayer:
    """The attention of layer ``index``. Raises ``InputError`` if its scale is not above 0."""
    values = layer_values(values, index)
    family = values.family
    attention = values.family.attention
    # query_pre_attn_scalar 0 divides by zero, a negative one gives a complex number: both are told
    # as a bad scale.
    try:
        scale = evaluate(attention.scale, values)
    except ZeroDivisionError:
        scale = math.inf
    if not is_number(scale) or scale <= 0:
        raise InputError(
            f"config.json: the attention scale ({attention.scale}) must be above 0, not {scale!r}"
        )
    growth = family.rotary.query_growth
    table = {} if growth is None else rope_table(values, values["layer_type"])
    return AttentionLayer(
        index=index,
        type=values["layer_type"],
        scale=float(scale),
        window=evaluate(attention.window, values),
        rotates=bool(evaluate(family.rotary.rotates, values)),
        softcap=evaluate(attention.softcap, values),
        clip=evaluate(attention.clip, values),
        alibi=bool(evaluate(attention.alibi, values)),
        sparse=values["sparse"],
        growth=checked_number(table, growth) if growth and table.get(growth) else 0.0,
    )


def block_of(values: Values, *, sparse: bool) -> Block:
    """The norms and MLP around the attention, sizes computed from the config; ``sparse``: a layer
    has experts.
    """
    block = values.family.block
    routing = None if block.routing is None else evaluated(block.routing, values)
    return evaluated(replace(block, sparse=sparse, routing=routing), values)
