"""Data types for a layer before and after conversion to multi-head latent attention (DeepSeek-V2,
arXiv:2405.04434).

Notation (attention/README.md): ``H`` query heads, ``E`` model dim, ``R`` channels of the latent,
``P`` rotary dims, ``N`` unrotated dims of a query head (the source's whole head dim: the rotary
dims come on top), ``D`` dims of a value head. Only ``c = down x + down_bias`` and one rotary key
``RoPE(rope_key x + rope_key_bias)``, shared by all heads, need to be cached per token. ``R`` counts
the channels of ``c``. Layout ``free`` stores one more, which is constant: ``--kv-rank`` counts it,
the transforms do not.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.convert.transforms.head_norms import linearize_norms_by_divisors
from kvfold.convert.transforms.linalg import append_bias, compute_output_metric
from kvfold.convert.transforms.weights import (
    AttentionWeights,
    HeadNorm,
    LayerStatistics,
    Rotary,
    TensorDataclass,
)


@dataclass(frozen=True)
class LayerProjections:
    """A layer's query, key and value projections as matrices on the inputs ``[x; 1]``, with biases
    in the last column.

    source: the layer
    rotary: its rotary embedding, whose amplitude is included in ``queries`` and ``keys``
    queries: ``[H, D, E+1]``, with a linear map in place of a norm
    keys: ``[G, D, E+1]``, with one number per head in place of what a norm divides by
    values: ``[G, D, E+1]``
    divisors: ``[G]``, these numbers; None without norms
    metric: ``[G, D, D]``, the squared length of the output per value
        (`linalg.compute_output_metric`)
    scale: multiplies scores
    """

    source: AttentionWeights
    rotary: Rotary
    queries: Tensor
    keys: Tensor
    values: Tensor
    divisors: Tensor | None
    metric: Tensor
    scale: float

    @property
    def query_heads_per_kv_head(self) -> int:
        """The number of query heads per key/value head."""
        return len(self.queries) // len(self.keys)


def build_projections(
    source: AttentionWeights,
    statistics: LayerStatistics,
    rotary: Rotary,
    scale: float | None = None,
    *,
    key_constant: bool = False,
) -> LayerProjections:
    """Return the projections of ``source`` with its norms replaced by linear maps
    (`linearize_norms_by_divisors`). ``scale`` is by default ``head_dim ** -0.5``.
    """
    weights, divisors = linearize_norms_by_divisors(source, statistics, key_constant=key_constant)
    queries = append_bias(weights.q, weights.q_bias)
    amplitudes = rotary.expand_amplitude(queries)
    return LayerProjections(
        source=source,
        rotary=rotary,
        queries=amplitudes * queries,
        keys=amplitudes * append_bias(weights.k, weights.k_bias),
        values=append_bias(weights.v, weights.v_bias),
        divisors=divisors,
        metric=compute_output_metric(weights.o.double(), weights.kv_heads),
        scale=weights.head_dim**-0.5 if scale is None else scale,
    )


@dataclass(frozen=True)
class LatentHeadNorms(TensorDataclass):
    """The source's norms on queries and keys in a latent attention layer, whose latent encodes the
    keys before their norm.

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
class QueryLatent(TensorDataclass):
    """The weights of queries that are computed from a latent of their own, ``c_q = down x``. Their
    biases remain in ``LatentWeights``.

    ``down [Rq, E]``, ``q_nope [H, N, Rq]``, ``q_rope [H, P, Rq]``.
    """

    down: Tensor
    q_nope: Tensor
    q_rope: Tensor


@dataclass(frozen=True)
class LatentWeights(TensorDataclass):
    """The weights of one multi-head latent attention layer (DeepSeek-V2 2024, sec. 2.1).

    It computes

        score_h = scale (q_nope,h . (uk_h c) + RoPE(q_rope,h) . RoPE(k_rope))
        y = sum_h o_h uv_h (attention_h c) + o_bias

    ``down [R, E]``, ``rope_key [P, E]``, ``q_nope [H, N, E]``, ``q_rope [H, P, E]``, ``uk [H, N,
    R]``, ``uv [H, D, R]``, ``o [E, H, D]``; biases ``down_bias [R]``, ``rope_key_bias [P]``,
    ``q_nope_bias [H, N]``, ``q_rope_bias [H, P]``, ``o_bias [E]``. Rotary dims are half-split: dim
    ``j`` pairs with ``j + P/2`` and turns by ``theta [P/2]`` radians per position, which stays
    float64. ``scale`` multiplies every score. If present, ``query`` replaces ``q_nope`` and
    ``q_rope``; so does ``norms``, with a different formula for the scores (`LatentHeadNorms`).

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
    norms: LatentHeadNorms | None = None

    @property
    def heads(self) -> int:
        """The number of query heads ``H``."""
        return self.q_nope.shape[0]

    @property
    def rank(self) -> int:
        """The number of latent channels ``R``, without the constant channel of layout ``free``."""
        return self.down.shape[0]

    @property
    def rope_dim(self) -> int:
        """The number of rotary dims ``P``."""
        return self.rope_key.shape[0]

    @property
    def nope_dim(self) -> int:
        """The number of unrotated dims ``N`` of a query head."""
        return self.q_nope.shape[1]

    @property
    def value_dim(self) -> int:
        """The number of dims ``D`` of a value head."""
        return self.uv.shape[1]
