"""Data types for a layer before and after conversion to multi-head latent attention (DeepSeek-V2,
arXiv:2405.04434).

Notation (attention/README.md): ``H`` query heads, ``E`` model dim, ``R`` channels of the latent,
``P`` rotary dims, ``N`` unrotated dims of a query head, ``D`` dims of a value head. Only ``c = down
x + down_bias`` and one rotary key ``RoPE(rope_key x + rope_key_bias)``, shared by all heads, need
to be cached per token.

Fits square their inputs and compare them with constants (the 1 that multiplies a bias). In float64
that works for ordinary layers but fails for finite ones whose weights are 1e15 times larger or
smaller. So fits use a layer in `Units` that bring everything near one. The units are powers of two,
so scaling by them is exact.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from kvfold.convert.transforms.linalg import append_bias, output_metric
from kvfold.convert.transforms.weights import (
    AttentionWeights,
    HeadNorm,
    LayerStatistics,
    Rotary,
    Tensors,
)

Scaled = TypeVar("Scaled", AttentionWeights, "LatentWeights")

# The squared errors of scores and of values are added in float64, with 53 bits of precision.
_LARGEST_SCORES = 2.0**16


@dataclass(frozen=True)
class LinearLayer:
    """One layer as linear maps on ``[x; 1]``: ``queries [H, D, E+1]``, ``keys [G, D, E+1]``,
    ``values [G, D, E+1]``.

    Queries and keys include the rotary amplitude. ``metric [G, D, D]``: the squared length of the
    output per value (`linalg.output_metric`). ``scale`` multiplies scores. ``group``: the number of
    query heads per key/value head.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    metric: Tensor
    scale: float
    group: int


def linear_layer(weights: AttentionWeights, rotary: Rotary, scale: float) -> LinearLayer:
    """The linear maps of ``weights``, which must have no norms on queries and keys (see
    `head_norms.linearize_heads`).
    """
    return LinearLayer(
        queries=rotary.amplify(append_bias(weights.q, weights.q_bias)),
        keys=rotary.amplify(append_bias(weights.k, weights.k_bias)),
        values=append_bias(weights.v, weights.v_bias),
        metric=output_metric(weights.o, weights.kv_heads),
        scale=scale,
        group=weights.heads // weights.kv_heads,
    )


@dataclass(frozen=True)
class KeptNorms(Tensors):
    """Norms on queries and keys around a latent that contains the keys before normalization.

    Let ``n_h = q_norm(q_h x + q_bias_h)``, and ``d_g`` the divisor of ``k_norm`` for ``k_g x +
    k_bias_g``. Then

        score_h = scale / d_g (n_h . (uk_h c + constant_h) + RoPE(rope_h n_h) . RoPE(k_rope))

    ``q [H, D, E]``, ``k [G, D, E]`` and the biases ``[H, D]`` and ``[G, D]`` are the source's;
    ``rope [H, P, D]``, ``constant [H, D]``. The gain of ``k_norm`` is part of ``uk``, ``constant``
    and ``rope``. A constant key does not result in a constant score here, because divisors differ
    from key to key. The cache contains ``1 / d_g`` next to ``c`` and ``k_rope``: ``G`` numbers, or
    one for a norm over all heads.
    """

    q: Tensor
    k: Tensor
    q_norm: HeadNorm
    k_norm: HeadNorm
    rope: Tensor
    constant: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None


@dataclass(frozen=True)
class QueryLatent(Tensors):
    """Queries computed from their own latent, ``c_q = down x``. Their biases remain in
    ``LatentWeights``.

    ``down [Rq, E]``, ``q_nope [H, N, Rq]``, ``q_rope [H, P, Rq]``.
    """

    down: Tensor
    q_nope: Tensor
    q_rope: Tensor


@dataclass(frozen=True)
class LatentWeights(Tensors):
    """The weights of one latent attention layer, which computes

        score_h = scale (q_nope,h . (uk_h c) + RoPE(q_rope,h) . RoPE(k_rope))
        y = sum_h o_h uv_h (attention_h c) + o_bias

    ``down [R, E]``, ``rope_key [P, E]``, ``q_nope [H, N, E]``, ``q_rope [H, P, E]``, ``uk [H, N,
    R]``, ``uv [H, D, R]``, ``o [E, H, D]``; biases ``down_bias [R]``, ``rope_key_bias [P]``,
    ``q_nope_bias [H, N]``, ``q_rope_bias [H, P]``, ``o_bias [E]``. Rotary dims are half-split: dim
    ``j`` pairs with ``j + P/2`` and turns by ``theta [P/2]`` radians per position, which stays
    float64. ``scale`` multiplies every score. If present, ``query`` replaces ``q_nope`` and
    ``q_rope``; so does ``norms``, with a different formula for the scores (`KeptNorms`).

    Keys and values need no bias. A constant key shifts every score of a query by the same amount,
    which the softmax ignores. A constant value reaches the output unchanged, because attention rows
    sum to one: it is part of ``o_bias``.
    """

    unmapped: ClassVar[tuple[str, ...]] = ("theta",)

    down: Tensor
    rope_key: Tensor
    q_nope: Tensor
    q_rope: Tensor
    uk: Tensor
    uv: Tensor
    o: Tensor
    theta: Tensor
    scale: float
    down_bias: Tensor | None = None
    rope_key_bias: Tensor | None = None
    q_nope_bias: Tensor | None = None
    q_rope_bias: Tensor | None = None
    o_bias: Tensor | None = None
    query: QueryLatent | None = None
    norms: KeptNorms | None = None

    @property
    def heads(self) -> int:
        return self.q_nope.shape[0]

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def rope_dim(self) -> int:
        return self.rope_key.shape[0]

    @property
    def nope_dim(self) -> int:
        return self.q_nope.shape[1]

    @property
    def value_dim(self) -> int:
        return self.uv.shape[1]


@dataclass(frozen=True)
class Units:
    """The sizes of inputs, queries, keys, values and outputs, as powers of two; 1 if all elements
    are zero.

    ``scores``: the size of scores, bounded, because far from one a softmax is saturated or uniform
    for any error.
    """

    inputs: float = 1.0
    queries: float = 1.0
    keys: float = 1.0
    values: float = 1.0
    outputs: float = 1.0
    scores: float = 1.0


def in_units(
    weights: AttentionWeights, statistics: LayerStatistics
) -> tuple[AttentionWeights, LayerStatistics, Units]:
    """Return the layer and the moments of its inputs in the layer's units, and the units; scores
    are scaled too.

    Units are root mean squares, rounded to powers of two and computed without biases.
    """
    gram = statistics.gram.double()
    mean = statistics.mean.double()
    parts = [
        part.double().flatten(0, 1).norm(dim=-1).mean()
        for part in (weights.q, weights.k, weights.v)
    ]
    root = weights.o.double().square().mean().sqrt()
    sizes = torch.stack([gram.diagonal().mean().clamp_min(0).sqrt(), *parts, root]).tolist()
    inputs, *rows, outputs = (2.0 ** round(math.log2(size)) if size > 0 else 1.0 for size in sizes)
    queries, keys, values = (inputs * row for row in rows)
    scores = min(max(queries * keys, 1 / _LARGEST_SCORES), _LARGEST_SCORES)
    wide = weights.map(lambda tensor: tensor.to(torch.promote_types(tensor.dtype, torch.float32)))
    factors = {"q": inputs / queries, "k": inputs / keys, "v": inputs / values, "o": 1 / outputs}
    biases = {
        "q_bias": 1 / queries,
        "k_bias": 1 / keys,
        "v_bias": 1 / values,
        "o_bias": 1 / values / outputs,
    }
    moments = replace(statistics, gram=gram / inputs / inputs, mean=mean / inputs)
    return (
        _scaled(wide, factors | biases),
        moments,
        Units(inputs, queries, keys, values, outputs, scores),
    )


def from_units(latent: LatentWeights, units: Units) -> LatentWeights:
    """Convert a latent fitted to a layer `in_units` to weights on the original inputs; the latent
    keeps its size.
    """
    # Shared rotary keys have no unit of their own: the queries that read them include it.
    rotary = units.queries * units.keys
    rows = {"down": 1.0, "rope_key": 1.0, "q_nope": units.queries, "q_rope": rotary}
    factors = {name: unit / units.inputs for name, unit in rows.items()}
    factors |= {"uk": units.keys, "uv": units.values, "o": units.outputs}
    biases = {
        "q_nope_bias": units.queries,
        "q_rope_bias": rotary,
        "o_bias": units.values * units.outputs,
    }
    return _scaled(latent, factors | biases)


def _scaled(part: Scaled, factors: Mapping[str, float]) -> Scaled:
    """``part`` with the tensors named in ``factors``, if present, multiplied by their factors."""
    present = {name: tensor for name in factors if (tensor := getattr(part, name)) is not None}
    return replace(part, **{name: tensor * factors[name] for name, tensor in present.items()})
