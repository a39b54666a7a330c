"""One layer before and after conversion to multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

`LinearLayer` is what a fit starts from, `LatentWeights` the result before any file layout.

Notation (attention/README.md): ``H`` query heads, ``E`` model dim, ``R`` channels of the latent, ``P`` rotary dims,
``N`` unrotated dims of a query head, ``D`` dims of a value head. Per token only ``c = down x + down_bias`` and one
rotary key ``RoPE(rope_key x + rope_key_bias)``, shared by all heads, need to be cached.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from torch import Tensor

from kvfold.convert.transforms.linalg import output_metric, with_bias
from kvfold.convert.transforms.weights import AttentionWeights, HeadNorm, Rotary


@dataclass(frozen=True)
class LinearLayer:
    """Linear maps on ``[x; 1]`` of one layer: ``queries [H, D, E+1]``, ``keys [G, D, E+1]``, ``values [G, D, E+1]``.

    The rotary amplitude is in queries and keys. ``metric [G, D, D]``: the squared length of the output per value
    (`linalg.output_metric`). ``scale`` multiplies scores.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    metric: Tensor
    scale: float

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.queries.shape[0] // self.keys.shape[0]

    @staticmethod
    def of(weights: AttentionWeights, rotary: Rotary, scale: float) -> "LinearLayer":
        """The layer of ``weights``, which must have no norms on queries and keys (`head_norms.linear_heads`)."""
        return LinearLayer(
            queries=rotary.amplify(with_bias(weights.q, weights.q_bias)),
            keys=rotary.amplify(with_bias(weights.k, weights.k_bias)),
            values=with_bias(weights.v, weights.v_bias),
            metric=output_metric(weights.o, weights.kv_heads),
            scale=scale,
        )


@dataclass(frozen=True)
class KeptNorms:
    """Norms on queries and keys around a latent that holds the keys before normalization.

    With ``n_h = q_norm(q_h x + q_bias_h)`` and ``d_g`` what ``k_norm`` divides the source's key ``k_g x + k_bias_g`` by

        score_h = scale / d_g (n_h . (uk_h c + constant_h) + RoPE(rope_h n_h) . RoPE(k_rope))

    ``q [H, D, E]``, ``k [G, D, E]``, biases ``[H, D]`` and ``[G, D]``: the source's; ``rope [H, P, D]``, ``constant [H,
    D]``. The gain of ``k_norm`` is part of ``uk``, ``constant`` and ``rope``. A constant key is no constant score here,
    because divisors differ from key to key. Cached beside ``c`` and ``k_rope`` is ``1 / d_g``: ``G`` elements, or one
    for a norm over all heads at once.
    """

    q: Tensor
    k: Tensor
    q_norm: HeadNorm
    k_norm: HeadNorm
    rope: Tensor
    constant: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "KeptNorms":
        """``change`` (a cast, a move) applied to every tensor, including those of the norms."""
        tensors = {item.name: value for item in fields(self) if isinstance(value := getattr(self, item.name), Tensor)}
        changed = {name: change(tensor) for name, tensor in tensors.items()}
        return replace(self, **changed, q_norm=self.q_norm.map(change), k_norm=self.k_norm.map(change))


@dataclass(frozen=True)
class QueryLatent:
    """Queries through their own latent, ``c_q = down x``. Their biases stay where they were, in ``LatentWeights``.

    ``down [Rq, E]``, ``q_nope [H, N, Rq]``, ``q_rope [H, P, Rq]``.
    """

    down: Tensor
    q_nope: Tensor
    q_rope: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "QueryLatent":
        """``change`` (a cast, a move) applied to every weight."""
        return QueryLatent(change(self.down), change(self.q_nope), change(self.q_rope))


@dataclass(frozen=True)
class LatentWeights:
    """The weights of one latent layer, which computes

        score_h = scale (q_nope,h . (uk_h c) + RoPE(q_rope,h) . RoPE(k_rope))
        y = sum_h o_h uv_h (attention_h c) + o_bias

    ``down [R, E]``, ``rope_key [P, E]``, ``q_nope [H, N, E]``, ``q_rope [H, P, E]``, ``uk [H, N, R]``, ``uv [H, D,
    R]``, ``o [E, H, D]``; biases ``down_bias [R]``, ``rope_key_bias [P]``, ``q_nope_bias [H, N]``, ``q_rope_bias [H,
    P]``, ``o_bias [E]``. Rotary dims are half-split: dim ``j`` pairs with ``j + P/2`` and turns by ``theta [P/2]``
    radians per position. ``scale`` multiplies every score. ``query``, where present, replaces ``q_nope`` and
    ``q_rope``; so do ``norms``, with another formula for the scores (`KeptNorms`).

    Keys and values need no bias: a constant key moves every score of a query by the same amount, which the softmax does
    not see, and a constant value reaches the output whole, because attention rows sum to one: it is part of ``o_bias``.
    """

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

    @property
    def model_dim(self) -> int:
        return self.down.shape[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> "LatentWeights":
        """``change`` (a cast, a move) applied to every weight; ``theta`` stays float64."""
        changed: dict[str, Tensor | QueryLatent | KeptNorms] = {
            item.name: change(value)
            for item in fields(self)
            if isinstance(value := getattr(self, item.name), Tensor) and item.name != "theta"
        }
        if self.query is not None:
            changed["query"] = self.query.map(change)
        if self.norms is not None:
            changed["norms"] = self.norms.map(change)
        return replace(self, **changed)  # type: ignore[arg-type]  # dataclasses.replace takes the union per field
