"""Data types for one attention layer, its rotary embedding and its calibration statistics, shared
by all transforms.

Notation (attention/README.md): ``H`` query heads, ``G`` key/value heads, ``D`` head dim, ``E``
model dim, ``D_rot`` rotary dims. Query head ``h`` reads key/value head ``h // (H // G)``. Storage
is half-split: the first ``D_rot`` dims of a head rotate, and dim ``l`` pairs with dim ``l +
D_rot/2``; the remaining dims do not rotate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

# The share of received attention in a token's weight (`LayerStatistics.list_token_weightings`). Not
# tuned: it gives an attention sink about the same weight as all other tokens.
RECEIVED_SHARE = 0.5


class TensorDataclass:
    """Base class of dataclasses of tensors, numbers and nested `TensorDataclass`, which can be
    cast, moved or indexed by heads as a whole.
    """

    unmapped: ClassVar[tuple[str, ...]] = ()

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with ``change`` (a cast, a move, a choice of heads) applied to all tensors,
        even nested ones.
        """
        changed: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type]  # a dataclass, in every subclass
            value = getattr(self, field.name)
            if isinstance(value, TensorDataclass):
                changed[field.name] = value.map_tensors(change)
            elif isinstance(value, Tensor) and field.name not in self.unmapped:
                changed[field.name] = change(value)
        return replace(self, **changed)  # type: ignore[type-var]

    def to(self, device: torch.device | str) -> Self:
        """Return a copy with all tensors on ``device``."""
        return self.map_tensors(lambda tensor: tensor.to(device))

    def __getitem__(self, heads: Sequence[int]) -> Self:
        """Return a copy with the given ``heads`` only, for a class whose tensors are all ``[heads,
        ...]``.
        """
        return self.map_tensors(lambda tensor: tensor[heads])


@dataclass(frozen=True)
class HeadNorm(TensorDataclass):
    """A norm on queries or keys, between projection and rotary embedding unless ``after_rotary``.

    No linear map in front of the rotary embedding can replace the gain of a norm behind it, because
    that gain belongs to rotated dims.

    kind: RMSNorm or LayerNorm
    weight: ``[heads, D]``
    bias: ``[heads, D]``
    eps: added to the mean square under the root
    offset: the gain is ``weight + offset`` (gemma stores the gain minus one)
    extent: what is normalized, each head or the flat ``heads * D`` vector of all heads
    shared: the file stores one row ``[D]`` for all heads
    after_rotary: the norm follows the rotary embedding
    """

    kind: Literal["rms", "layer"]
    weight: Tensor
    bias: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0
    extent: Literal["head", "flat"] = "head"
    shared: bool = False
    after_rotary: bool = False


@dataclass(frozen=True)
class AttentionWeights(TensorDataclass):
    """The weights of one attention layer, with a separate axis for heads.

    q: ``[H, D, E]``
    k, v: ``[G, D, E]``
    o: ``[E, H, D]``
    q_bias: ``[H, D]``
    k_bias, v_bias: ``[G, D]``
    o_bias: ``[E]``
    q_norm, k_norm: norms on queries and keys
    sinks: ``[H]``, each head's score for one more key, whose value is zero (gpt-oss)
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    sinks: Tensor | None = None

    @property
    def heads(self) -> int:
        """The number of query heads ``H``."""
        return self.q.shape[0]

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads ``G``."""
        return self.k.shape[0]

    @property
    def head_dim(self) -> int:
        """The number of dims ``D`` of a head."""
        return self.q.shape[1]

    @property
    def model_dim(self) -> int:
        """The number of dims ``E`` of the residual stream."""
        return self.q.shape[2]


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of one attention layer: frequencies and amplitude.

    theta: ``[D_rot/2]``, each pair's angle per position in radians, float64; empty without rotation
    amplitude: multiplies rotated queries and rotated keys (YaRN's attention factor), so that scores
        have its square
    """

    theta: Tensor
    amplitude: float = 1.0

    @property
    def dims(self) -> int:
        """The number of dims of a head that rotate."""
        return 2 * self.theta.numel()

    def expand_amplitude(self, like: Tensor) -> Tensor:
        """Return the factor by which the rotary embedding multiplies each dim of a head (YaRN's
        attention factor for rotary dims, 1 for others), ``[D, 1]``, for projections such as
        ``like [heads, D, n]``.
        """
        factors = like.new_ones(like.shape[1], 1)
        factors[: self.dims] = self.amplitude
        return factors


@dataclass(frozen=True)
class LayerStatistics(TensorDataclass):
    """Statistics of one layer's attention on calibration text, float64.

    The last three are None unless queries and keys are normalized: ``n`` are then the queries, and
    behind them the keys, after their norms and before rotation.

    gram: ``[E, E] = E[x x^T]`` of the attention inputs ``x``, after the layer's norm
    mean: ``[E] = E[x]``
    tokens: the number of tokens averaged
    profile: ``[H, S]``, the mean attention weight of each head at each distance; rows sum to 1
    received_gram, received_mean: the averages with every token weighted by the attention that it
        receives; None if this was not measured
    normed: ``[H + G, D, E+1] = E[n x~^T]``
    received_normed: ``normed`` weighted by received attention
    divisors: ``[H + G, 2]``, the mean and the mean square of the norms' divisors
    """

    gram: Tensor
    mean: Tensor
    tokens: int
    profile: Tensor
    received_gram: Tensor | None = None
    received_mean: Tensor | None = None
    normed: Tensor | None = None
    received_normed: Tensor | None = None
    divisors: Tensor | None = None

    def list_token_weightings(self) -> "list[LayerStatistics]":
        """Return these statistics, and those in which a token weighs ``1 - s + s * received``:
        ``s`` is `RECEIVED_SHARE`, ``received`` the attention that the token receives, 1 on average.
        Only the first if attention was not measured.

        Real decoders park attention on a few tokens, above all the first one, whose inputs are
        unlike any others. Such a sink is one key among hundreds, so least squares over tokens
        barely account for it, yet an error in its key changes every row. Weighting tokens by
        received attention fixes this, but costs accuracy without a sink: fit a layer both ways, and
        let its error on held-out sequences decide.
        """
        if self.received_gram is None or self.received_mean is None:
            return [self]
        gram = torch.lerp(self.gram, self.received_gram, RECEIVED_SHARE)
        mean = torch.lerp(self.mean, self.received_mean, RECEIVED_SHARE)
        normed = self.normed
        if normed is not None and self.received_normed is not None:
            normed = torch.lerp(normed, self.received_normed, RECEIVED_SHARE)
        return [self, replace(self, gram=gram, mean=mean, normed=normed)]


def make_blank_statistics(
    weights: AttentionWeights, scales: Tensor | None = None
) -> LayerStatistics:
    """Return the statistics to assume without calibration text: every token attends only to itself,
    and inputs are uncorrelated with mean 0.

    The standard deviations of the input channels are ``scales [E]``, 1 by default.
    """
    gram = torch.eye(weights.model_dim, dtype=torch.float64, device=weights.q.device)
    if scales is not None:
        gram = gram * scales.to(gram).square()
    return LayerStatistics(gram, torch.zeros_like(gram[0]), 0, gram.new_ones(weights.heads, 1))
