"""Latent attention that keeps the norms on queries and keys, for a layout that has a place for them.

A norm divides a key by a number ``d_g(x)`` that depends on token and head; the rest of it is linear. So the latent is
fitted to keys divided by one number per head instead, and that number is multiplied back into the weights that read the
latent. Scores are then divided by the exact ``d_g`` of the source, whatever the size of the latent (`KeptNorms`).
Queries keep their projection and their norm.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvfold.convert.transforms.distances import mixed_distances, rotation_gains
from kvfold.convert.transforms.head_norms import divided_heads
from kvfold.convert.transforms.latent import als
from kvfold.convert.transforms.latent.latent import FittedLayer, assemble, fit_layer, svd_fit
from kvfold.convert.transforms.latent.slots import Slots, apply_gains
from kvfold.convert.transforms.latent.weights import KeptNorms, LatentWeights
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary


def to_normed_latent(
    weights: AttentionWeights,
    statistics: LayerStatistics,
    rotary: Rotary,
    slots: Slots,
    rank: int,
    *,
    context: int = 0,
    scale: float | None = None,
    rounds: int | None = None,
) -> LatentWeights:
    """``to_latent`` of a layer with norms on queries and keys, which stay. Centered."""
    linear, divisors = divided_heads(weights, statistics, key_constant=True)
    made = fit_layer(
        linear, statistics, rotary, slots, rank, context=context, scale=scale, centered=True, rounds=rounds
    )
    gains = partial(
        rotation_gains, mixed_distances(statistics.profile.to(made.mean.device), context, als.UNIFORM, als.TAIL)
    )
    missing = apply_gains((made.layer.keys @ made.mean)[..., None], gains(rotary.theta), rotary)[..., 0]
    if slots.rope_dim:
        # The latent is centered, so that only the rotary keys have a mean that heads read.
        rope = made.fit.rows[: slots.rope_dim] @ made.mean
        turned = torch.complex(*rope.chunk(2)) * gains(slots.theta)
        seen = torch.cat([turned.real, turned.imag], -1)  # [H, P]
        missing = missing - (made.fit.reading[..., : slots.rope_dim] @ seen[..., None])[..., 0]
    return _keep_norms(weights, made, slots, missing, divisors * made.units.keys, rotary)


def svd_normed_latent(
    weights: AttentionWeights,
    statistics: LayerStatistics,
    rotary: Rotary,
    slots: Slots,
    rank: int,
    *,
    scale: float | None = None,
    gain: Tensor | None = None,
) -> LatentWeights:
    """``svd_latent`` of a layer with norms on queries and keys, which stay; ``statistics`` without text."""
    linear, divisors = divided_heads(weights, statistics)
    made = svd_fit(linear, rotary, slots, rank, scale=scale, gain=gain)
    keys = made.layer.keys[..., -1].repeat_interleave(made.layer.group, 0)
    missing = keys - made.fit.reading[..., : slots.rope_dim] @ made.fit.rows[: slots.rope_dim, -1]
    return _keep_norms(weights, made, slots, missing, divisors, rotary)


def _keep_norms(
    weights: AttentionWeights, made: FittedLayer, slots: Slots, missing: Tensor, divisors: Tensor, rotary: Rotary
) -> LatentWeights:
    """A fit to the keys over ``divisors [G]`` as weights, with the norms of ``weights``.

    ``missing [H, D]``: the constant part of the keys that the readings leave out.
    """
    if weights.q_norm is None or weights.k_norm is None:
        raise ValueError("weights: queries and keys must both have a norm; use to_latent")
    latent, rope = assemble(made, slots), slots.rope_dim
    times = rotary.amplify(divisors.repeat_interleave(made.layer.group)[:, None, None].expand(*missing.shape, 1))
    reading = made.fit.reading * times
    norms = KeptNorms(
        q=weights.q,
        k=weights.k,
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        rope=reading[..., :rope].mT,
        constant=missing * times[..., 0],
        q_bias=weights.q_bias,
        k_bias=weights.k_bias,
    )
    kept = norms.map(lambda tensor: tensor.to(latent.down).contiguous())
    return replace(latent, uk=reading[..., rope:].to(latent.down).contiguous(), norms=kept)
