"""One attention layer as multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), before any file layout.

Notation (attention/README.md): ``H`` query heads, ``E`` model dim, ``R`` channels of the latent, ``P`` rotary dims,
``N`` unrotated dims of a query head, ``D`` dims of a value head. Per token only ``c = down x + down_bias`` and one
rotary key ``RoPE(rope_key x + rope_key_bias)``, shared by all heads, need to be cached.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from torch import Tensor

from kvfold.convert.transforms.weights import HeadNorm


@dataclass(frozen=True)
class KeptNorms:
    """Norms on queries and keys, kept around a latent that holds the keys as they are before theirs.

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
        """Every tensor through ``change`` (a cast, a move), those of the norms included."""
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
        """Every weight through ``change`` (a cast, a move)."""
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

    Keys and values need no bias of their own: a constant key moves every score of a query alike, which the softmax does
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
        """Every weight through ``change`` (a cast, a move); ``theta`` stays float64."""
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
