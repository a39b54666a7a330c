"""The sizes of a model, the attention of each layer, and the block around it, computed from the values of a config."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from kvfold.convert.errors import InputError
from kvfold.convert.families.rotary import checked_number, rope_table, rotary_dims
from kvfold.convert.families.values import Values, evaluate, is_number


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model: layers, query heads H, key/value heads G, head dim D, width E, and rotary dims per head."""

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

    ``scale`` multiplies q . k. ``window`` is the number of keys that a query can attend to, including its own; None
    means all. ``softcap`` c turns scores s into ``c tanh(s / c)``. ``clip`` bounds the elements of q, k and v after
    projection (olmo). ``growth`` g multiplies queries at position t by ``1 + g log(1 + floor(t / original context))``
    (Llama 4).
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


@dataclass(frozen=True)
class Routing:
    """Routing of each token to the ``per_token`` experts with the largest softmax probabilities of the router.

    The probabilities weight the outputs of these experts; if ``renormalized``, they are first divided by their sum.
    """

    per_token: int
    renormalized: bool


@dataclass(frozen=True)
class Block:
    """The parts of a decoder layer and of the model around the attention.

    ``order``: ``pre`` x + f(norm(x)); ``post`` x + norm(f(x)); ``outer`` norm(x + f(x)); ``sandwich`` pre and post;
    ``parallel`` x + attention(n) + mlp(n), with one n = norm(x) or a separate norm for each. ``mlp``: ``gated``,
    ``gated_fused`` (gate and up in one tensor) or ``plain``. The gain of a norm is weight + ``norm_offset``.
    ``residual_scale`` multiplies the output of each sublayer before it is added. ``routing`` is None without experts or
    if `Routing` does not describe their choice and weights.
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
    routing: Routing | None
    residual_scale: float
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None
    tied: bool


def geometry_of(values: Values) -> Geometry:
    """The sizes of the model. Raises ``InputError`` unless the key/value heads divide the query heads."""
    sizes = values.family.sizes
    heads = kv_heads = evaluate(sizes.heads, values)
    if sizes.kv_heads is not None:
        kv_heads = int(values[sizes.kv_heads])
    elif sizes.own_kv_heads is not None:
        kv_heads = int(evaluate(sizes.own_kv_heads, values))
    if heads % kv_heads:
        name = sizes.kv_heads or "key/value heads"
        raise InputError(f"config.json: {name} is {kv_heads}, but it must divide the {heads} query heads")
    return Geometry(
        layers=evaluate(sizes.layers, values),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=evaluate(sizes.head_dim, values),
        model_dim=evaluate(sizes.model_dim, values),
        rotary_dims=rotary_dims(values),
        vocabulary=evaluate(sizes.vocabulary, values),
        positions=evaluate(sizes.positions, values),
        initializer_range=evaluate(sizes.initializer_range, values),
    )


def layer_values(values: Values, index: int) -> Values:
    """``values`` plus ``layer``, ``layer_type`` and ``sparse`` (experts instead of one MLP) for layer ``index``."""
    family = values.family
    try:
        layer_type = evaluate(family.attention.layer_type, replace(values, names={"layer": index}))
    except TypeError as error:  # a pattern in words, which the class itself cannot read without layer_types
        raise InputError(f"config.json: layer_types is missing and cannot be derived ({error}); add it") from None
    if layer_type not in (None, "full_attention", "sliding_attention"):
        raise InputError(
            f"config.json: layer {index} has type {layer_type!r}, but model_type {family.model_type!r} is supported "
            "only with 'full_attention' and 'sliding_attention'"
        )
    scope = replace(values, names={"layer": index, "layer_type": layer_type})
    return replace(values, names={**scope.names, "sparse": bool(evaluate(family.block.sparse, scope))})


def layer_of(values: Values, index: int) -> AttentionLayer:
    """The attention of layer ``index``. Raises ``InputError`` if its scale is not above 0."""
    values = layer_values(values, index)
    family, attention = values.family, values.family.attention
    # query_pre_attn_scalar 0 divides by zero, a negative one gives a complex number: both are told as a bad scale.
    try:
        scale = evaluate(attention.scale, values)
    except ZeroDivisionError:
        scale = math.inf
    if not is_number(scale) or scale <= 0:
        raise InputError(f"config.json: the attention scale ({attention.scale}) must be above 0, not {scale!r}")
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
    """The block around the attention, for targets that must express it in another class."""
    block, routing = values.family.block, None
    if (spec := block.routing) is not None:
        routing = Routing(int(evaluate(spec.per_token, values)), bool(evaluate(spec.renormalized, values)))
    return Block(
        norm=block.norm,
        norm_eps=float(evaluate(block.norm_eps, values)),
        norm_offset=block.norm_offset,
        norm_bias=block.norm_bias,
        norm_weight=block.norm_weight,
        activation=evaluate(block.activation, values),
        mlp=block.mlp,
        order=evaluate(block.order, values),
        sparse=sparse,
        routing=routing,
        residual_scale=float(evaluate(block.residual_scale, values)),
        embedding_scale=float(evaluate(block.embedding_scale, values)),
        logit_scale=float(evaluate(block.logit_scale, values)),
        logit_softcap=evaluate(block.logit_softcap, values),
        tied=bool(evaluate(block.tied, values)),
    )
