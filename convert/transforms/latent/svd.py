"""The baseline without calibration: a truncated SVD of the stacked key and value projections.

Rotary keys come from a uniform stride over the frequencies, as in MHA2MLA (arXiv:2502.14837): one shared key per slot,
the principal component over the heads' weights. What is left of the keys loses its rotation.
"""

import torch

from kvfold.convert.transforms.latent.latent import (
    Basis,
    assemble,
    first_fit,
    linear_layer,
    principal_basis,
    split_rotary,
    unrotated_keys,
)
from kvfold.convert.transforms.latent.slots import Slots, query_moment
from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary


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
    model_dim, device = weights.model_dim, weights.q.device
    zeros, eye = torch.zeros(model_dim, dtype=torch.float64), torch.eye(model_dim, dtype=torch.float64)
    blank = LayerStatistics(eye, zeros, 0, torch.ones(weights.heads, 1, dtype=torch.float64)).to(device)
    layer, queries = linear_layer(weights, rotary, scale), query_moment(weights, blank, rotary)
    split = split_rotary(weights, blank, rotary, slots, queries)
    keys = unrotated_keys(weights, rotary, split.rest)
    basis = principal_basis(torch.cat([keys, layer.values])[..., :-1].flatten(0, 1), eye.to(device), rank)
    expected = (basis.down if gain is None else basis.down * gain.to(device).double()).norm().clamp_min(1e-30)
    basis = Basis(basis.down / expected, basis.readout * expected)
    per_head = keys.repeat_interleave(weights.heads // weights.kv_heads, 0)
    return assemble(weights, layer, blank, first_fit(split, per_head, layer.values, basis), slots, centred=False)
