"""One attention layer, its rotary embedding and its calibration statistics, as every transform reads and returns them.

Notation (attention/README.md): ``H`` query heads, ``G`` key/value heads, ``D`` head dim, ``E`` model dim, ``D_rot``
rotary dims. Query head ``h`` reads key/value head ``h // (H // G)``. Storage is half-split: the first ``D_rot`` dims of
a head rotate, and dim ``l`` pairs with dim ``l + D_rot/2``; the remaining dims do not rotate.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor


class Tensors:
    """A dataclass of tensors, numbers and further such dataclasses. ``unmapped``: the tensors that `map` leaves."""

    unmapped: ClassVar[tuple[str, ...]] = ()

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with ``change`` (a cast, a move, a choice of heads) applied to every tensor, also to nested ones."""
        changed: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type]  # a dataclass, in every subclass
            value = getattr(self, field.name)
            if isinstance(value, Tensors):
                changed[field.name] = value.map(change)
            elif isinstance(value, Tensor) and field.name not in self.unmapped:
                changed[field.name] = change(value)
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass(frozen=True)
class HeadNorm(Tensors):
    """A norm on queries or keys, between projection and rotary embedding unless ``after_rotary``.

    ``weight`` and ``bias`` are ``[heads, D]``; ``shared``: the file has one row ``[D]`` for all heads. ``extent``: the
    vector that is normalized, each head alone or the flat ``heads * D`` vector of all heads. The gain applied is
    ``weight + offset`` (gemma stores the gain minus one). ``after_rotary``: the norm follows the rotary embedding; no
    linear map in front of it can replace its gain, which belongs to rotated dims.
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
class AttentionWeights(Tensors):
    """``q [H, D, E]``, ``k, v [G, D, E]``, ``o [E, H, D]``; biases ``[H, D]``, ``[G, D]``, ``[G, D]``, ``[E]``.

    ``sinks [H]``: scores of one more key, whose value is zero (gpt-oss).
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
        return self.q.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[0]

    @property
    def head_dim(self) -> int:
        return self.q.shape[1]

    @property
    def model_dim(self) -> int:
        return self.q.shape[2]


@dataclass(frozen=True)
class Rotary:
    """``theta [D_rot/2]``: the angle of each pair per position, in radians, float64. Empty when nothing rotates.

    ``amplitude`` multiplies rotated queries and keys alike (yarn's attention factor), so scores carry its square.
    """

    theta: Tensor
    amplitude: float = 1.0

    @property
    def dims(self) -> int:
        return 2 * self.theta.numel()

    def amplify(self, rows: Tensor) -> Tensor:
        """``rows [heads, D, n]`` with the rotating dims multiplied by the amplitude."""
        return torch.cat([rows[:, : self.dims] * self.amplitude, rows[:, self.dims :]], 1)


@dataclass(frozen=True)
class LayerStatistics(Tensors):
    """Calibration statistics of one layer, float64.

    ``gram [E, E] = E[x x^T]`` and ``mean [E] = E[x]`` over ``tokens`` attention inputs ``x`` (after the layer's norm);
    ``profile [H, S]``: the mean attention weight of head ``h`` at distance ``delta`` (rows sum to 1).
    ``received_gram``, ``received_mean``: the same averages with every token weighted by the attention that it receives,
    None where that was not measured.

    Where queries and keys are normalized: ``normed [H + G, D, E+1] = E[n x~^T]``, with ``n`` the queries, then the
    keys, after their norms and before they rotate (``received_normed`` likewise), and ``divisors [H + G, 3]``: the
    mean and the mean square of the norms' divisors, and the mean of ``|n|^2``.
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

    def to(self, device: torch.device | str) -> "LayerStatistics":
        return self.map(lambda tensor: tensor.to(device))

    def counting_received(self, share: float) -> "LayerStatistics":
        """Statistics with tokens weighted by ``1 - share + share * received`` attention, which is 1 on average.

        Raises ValueError for a share above 0 where received attention was not measured.
        """
        # Without a share nothing need have been measured.
        if share == 0:
            return self
        if self.received_gram is None or self.received_mean is None:
            raise ValueError(f"share: {share} needs averages by received attention, which were not measured; use 0")
        gram, mean = torch.lerp(self.gram, self.received_gram, share), torch.lerp(self.mean, self.received_mean, share)
        if self.normed is None or self.received_normed is None:
            return replace(self, gram=gram, mean=mean)
        return replace(self, gram=gram, mean=mean, normed=torch.lerp(self.normed, self.received_normed, share))


def blank_statistics(
    model_dim: int, heads: int, device: torch.device | str = "cpu", *, scales: Tensor | None = None
) -> LayerStatistics:
    """Statistics without a text: attention to the token itself, inputs of mean 0, uncorrelated.

    Input channels have standard deviations ``scales [E]``, by default 1.
    """
    gram = torch.eye(model_dim, dtype=torch.float64, device=device)
    if scales is not None:
        gram = gram * scales.to(gram).square()
    return LayerStatistics(gram, gram.new_zeros(model_dim), 0, gram.new_ones(heads, 1))
