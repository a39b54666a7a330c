"""The constant channel of layout ``free``: it makes the live norm of a latent a known factor.

DeepSeek normalizes its latents; a converted model must not. The last channel of each latent is a constant ``B``, set
by a bias, so large that the norm divides by ``B / sqrt(R)`` whatever the token: for a latent ``c`` of unit energy the
error is about ``|c|^2 / 2 B^2``. ``B`` and the norm's weight are powers of two, which bfloat16 and float16 hold
exactly; what is left of the factor goes into the weights that read the latent.

Training must keep all of it. The bias, the channel's row of zeros and the norm's weights are frozen; gradients would
trade them for a little less error. The columns that read the channel have an input ``B`` times larger than the others
and must move by as much less.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# With 256 the logits of a full-rank factoring are off by more than 1e-4; with 1024 float16 still holds c sqrt(R) / B
# of the weakest channels worth having.
CONSTANT = 1024.0
_NORM_OF = {"q_a_proj": "q_a_layernorm", "kv_a_proj_with_mqa": "kv_a_layernorm"}
_READERS = ("q_b_proj", "kv_b_proj")


def norm_weight(rank: int) -> float:
    """The power of two nearest to ``B / sqrt(R)``, on a logarithmic scale."""
    return float(2.0 ** round(math.log2(CONSTANT / math.sqrt(rank))))


def norm_remainder(rank: int) -> float:
    """The factor between ``B / sqrt(R)`` and ``norm_weight(R)``, which the weights that read the latent undo."""
    return CONSTANT / math.sqrt(rank) / norm_weight(rank)


def with_constant(bias: Tensor) -> Tensor:
    """The latent's bias ``[R-1]`` with the constant channel behind it."""
    return torch.cat([bias, bias.new_full((1,), CONSTANT)])


@dataclass(frozen=True)
class HeldSlice:
    """The constant channel's part of a tensor: slice ``index`` along ``axis``.

    ``pace`` is its learning rate relative to the rest of the tensor; 0 freezes it.
    """

    axis: int
    index: int
    pace: float


def held_slices(tensors: Mapping[str, Tensor]) -> dict[str, HeldSlice]:
    """The held slice of each of ``tensors`` that has one, by name; only shapes are read.

    The bias and the row of zeros behind it are frozen, the columns that read the channel move slowly.
    """
    held: dict[str, HeldSlice] = {}
    for name in tensors:
        parent, _, kind = name.rpartition(".")
        path, _, projection = parent.rpartition(".")
        if projection in _NORM_OF:
            rank = len(tensors[f"{path}.{_NORM_OF[projection]}.weight"])
            held[name] = HeldSlice(0, rank - 1, 0.0)
        elif projection in _READERS and kind == "weight":
            held[name] = HeldSlice(1, tensors[name].shape[1] - 1, 1 / CONSTANT)
    return held


def latent_norms(names: Iterable[str]) -> list[str]:
    """The weights of the latents' norms among ``names``, which are frozen."""
    return [name for name in names if name.split(".")[-2:-1] and name.split(".")[-2] in _NORM_OF.values()]
