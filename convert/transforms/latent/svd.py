"""The baseline without calibration: a truncated SVD of the stacked key and value projections.

Rotary keys come from a uniform stride over the frequencies, as in MHA2MLA (arXiv:2502.14837): one shared key per slot,
the principal component over the heads' weights. What is left of the keys loses its rotation.
"""

import torch

from kvfold.convert.transforms.latent.latent import (
    Basis,
    LatentFit,
    assemble,
    first_fit,
    linear_layer,
    principal_basis,
    split_rotary,
)
from kvfold.convert.transforms.latent.slots import Slots
from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.linalg import head_moments
from kvfold.convert.transforms.weights import AttentionWeights, Rotary


def svd_latent(
    weights: AttentionWeights,
    rotary: Rotary,
    slots: Slots,
    rank: int,
    *,
    scale: float | None = None,
    gain: torch.Tensor | None = None,
) -> LatentWeights:
    """A layer with ``rank`` latent channels from its weights alone; ``slots`` from ``stride_slots``.

    ``gain [E]``, the weight of the norm before the attention, only sets the scale of the latent.
    """
    return assemble(weights, svd_fit(weights, rotary, slots, rank, scale=scale, gain=gain), slots, centered=False)


def svd_fit(
    weights: AttentionWeights,
    rotary: Rotary,
    slots: Slots,
    rank: int,
    *,
    scale: float | None = None,
    gain: torch.Tensor | None = None,
) -> LatentFit:
    """The fit of ``svd_latent``, before it is written as weights."""
    layer = linear_layer(weights, rotary, weights.head_dim**-0.5 if scale is None else scale)
    moment = torch.eye(weights.model_dim + 1, dtype=torch.float64, device=weights.q.device)  # nothing known of inputs
    split = split_rotary(layer, rotary, slots, head_moments(layer.queries, moment), moment)
    rows = torch.cat([split.rest, layer.values])[..., :-1].flatten(0, 1)
    basis = principal_basis(rows, moment[:-1, :-1], rank)
    norm = (basis.down if gain is None else basis.down * gain.to(basis.down)).norm().clamp_min(1e-30)
    basis = Basis(basis.down / norm, basis.readout * norm)
    per_head = split.rest.repeat_interleave(layer.group, 0)
    return LatentFit(layer, moment[-1], first_fit(split, per_head, layer.values, basis))
