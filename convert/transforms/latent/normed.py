"""Latent attention that keeps the norms on queries and keys, for a layout that has a place for them.

A norm divides a key by a number ``d_g(x)`` that depends on token and head; all else it does is linear. So the latent is
fitted to the keys over one number per head, as if nothing were divided, and the numbers become part of what reads it:
scores are then divided by the source's own ``d_g``, exact whatever the size of the latent (`KeptNorms`). Queries keep
their projection and their norm.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvfold.convert.transforms.distances import mixed_distances, rotation_gains
from kvfold.convert.transforms.head_norms import divided_heads
from kvfold.convert.transforms.latent import als
from kvfold.convert.transforms.latent.latent import LatentFit, apply_gains, assemble, assemble_layer, fit_layer
from kvfold.convert.transforms.latent.slots import Slots, amplified
from kvfold.convert.transforms.latent.svd import svd_fit
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
    scale = weights.head_dim**-0.5 if scale is None else scale
    made = fit_layer(
        linear, statistics, rotary, slots, rank, context=context, scale=scale, centered=True, rounds=rounds
    )
    fitted = made.fitted
    profile = statistics.profile.to(fitted.mean.device)
    distances = mixed_distances(profile, context, als.UNIFORM, als.TAIL)
    gains = partial(rotation_gains, distances)
    missing = apply_gains((fitted.layer.keys @ fitted.mean)[..., None], gains(rotary.theta), rotary)[..., 0]
    if slots.rope_dim:
        rope = fitted.fit.rows[: slots.rope_dim] @ fitted.mean  # of the latent nothing: it is centered
        seen = _turned(rope, gains(slots.theta))
        missing = missing - (fitted.fit.reading[..., : slots.rope_dim] @ seen[..., None])[..., 0]
    latent = assemble_layer(made, slots, scale, centered=True)
    return keep_norms(weights, latent, fitted, missing, divisors * made.units.keys, rotary)


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
    fitted = svd_fit(linear, rotary, slots, rank, scale=scale, gain=gain)
    reading, keys = fitted.fit.reading, fitted.layer.keys[..., -1].repeat_interleave(fitted.layer.group, 0)
    missing = keys - reading[..., : slots.rope_dim] @ fitted.fit.rows[: slots.rope_dim, -1]
    return keep_norms(weights, assemble(linear, fitted, slots, centered=False), fitted, missing, divisors, rotary)


def keep_norms(
    weights: AttentionWeights,
    latent: LatentWeights,
    fitted: LatentFit,
    missing: Tensor,
    divisors: Tensor,
    rotary: Rotary,
) -> LatentWeights:
    """``latent`` with the norms of ``weights``. ``fitted`` are keys over ``divisors [G]``.

    ``missing [H, D]``: the constant that its readings leave of the keys.
    """
    if weights.q_norm is None or weights.k_norm is None:
        raise ValueError("weights: expected norms on queries and keys, found none")
    times = amplified(divisors.repeat_interleave(fitted.layer.group)[:, None, None].expand(*missing.shape, 1), rotary)
    reading = fitted.fit.reading * times
    rope = latent.rope_dim
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


def _turned(rows: Tensor, gains: Tensor) -> Tensor:
    """Half-split ``rows [P]`` times complex ``gains [H, P/2]``: ``[H, P]``."""
    half = len(rows) // 2
    turned = torch.complex(rows[:half], rows[half:]) * gains
    return torch.cat([turned.real, turned.imag], -1)
