"""A layer as linear maps on ``[x; 1]``, and its keys split into shared rotary keys and what these leave."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.convert.transforms.latent.als import LinearLayer
from kvfold.convert.transforms.latent.slots import Slots, amplified, components, pair_keys, query_scales
from kvfold.convert.transforms.linalg import output_metric, with_bias
from kvfold.convert.transforms.weights import AttentionWeights, Rotary


@dataclass(frozen=True)
class RotarySplit:
    """The slots' keys ``rows [P, E+1]``, each head's ``reading [H, D, P]`` of them, ``rest [G, D, E+1]`` of keys."""

    rows: Tensor
    reading: Tensor
    rest: Tensor


def linear_layer(weights: AttentionWeights, rotary: Rotary, scale: float) -> LinearLayer:
    """The layer as maps on ``[x; 1]``, the rotary amplitude multiplied into queries and keys."""
    return LinearLayer(
        queries=amplified(with_bias(weights.q, weights.q_bias), rotary),
        keys=amplified(with_bias(weights.k, weights.k_bias), rotary),
        values=with_bias(weights.v, weights.v_bias),
        metric=output_metric(weights.o, weights.kv_heads),
        scale=scale,
    )


def split_rotary(layer: LinearLayer, rotary: Rotary, slots: Slots, queries: Tensor, moment: Tensor) -> RotarySplit:
    """The slots' rotary keys, how heads read them, and the keys without them.

    ``queries [H, D, D]`` and ``moment [E+1, E+1]`` are the second moments of queries and of ``[x; 1]``.
    """
    half, keys = rotary.dims // 2, layer.keys
    reading = keys.new_zeros(*layer.queries.shape[:2], slots.rope_dim)
    if not half:
        return RotarySplit(keys.new_zeros(slots.rope_dim, keys.shape[-1]), reading, keys)
    pairs = pair_keys(keys, queries, moment, rotary)
    scales = query_scales(pairs)
    _, vectors = components(pairs)
    shared: list[Tensor] = []
    left_over: list[Tensor] = []
    slot = 0
    for pair, count in enumerate(slots.counts):
        key, factor, left = _split_pair(pairs.keys[:, pair], scales[:, pair], vectors[pair, :, :count])
        factor = factor.repeat_interleave(layer.group, 0)  # [H, count]: key of the head = factor . shared key
        _read_pair(reading, factor, pair, half, slot)
        shared.append(key)
        left_over.append(left)
        slot += count
    left = torch.stack(left_over, 1)  # [G, L, E+1]
    rest = torch.cat([left.real, left.imag, keys[:, rotary.dims :]], 1)
    return RotarySplit(_real(torch.cat(shared)), reading, rest)


def _split_pair(key: Tensor, scale: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One frequency, ``key [G, E+1]``: shared keys ``[count, E+1]``, each head's factors ``[G, count]``, the rest."""
    shared = basis.mH @ (scale[:, None] * key)
    factor = basis / scale[:, None]
    unit = scale.square().mean().sqrt()
    return shared / unit, factor * unit, key - factor @ shared


def _read_pair(reading: Tensor, factor: Tensor, pair: int, half: int, slot: int) -> None:
    """Enter complex factors ``[H, count]`` of ``pair`` on the slots from ``slot`` on into ``reading [H, D, P]``."""
    slots = reading.shape[2] // 2
    real, imaginary = slice(slot, slot + factor.shape[1]), slice(slots + slot, slots + slot + factor.shape[1])
    reading[:, pair, real] = reading[:, half + pair, imaginary] = factor.real
    reading[:, half + pair, real] = factor.imag
    reading[:, pair, imaginary] = -factor.imag


def apply_gains(keys: Tensor, gains: Tensor, rotary: Rotary) -> Tensor:
    """``[G, D, n]`` as every query head's ``[H, D, n]``, the rotating pairs times their gain ``m_{h,l}``."""
    half = rotary.dims // 2
    per_head = keys.repeat_interleave(gains.shape[0] // keys.shape[0], 0)
    real, imaginary, still = per_head[:, :half], per_head[:, half : 2 * half], per_head[:, 2 * half :]
    a, b = gains.real[..., None], gains.imag[..., None]
    return torch.cat([a * real - b * imaginary, a * imaginary + b * real, still], 1)


def _real(rows: Tensor) -> Tensor:
    """Complex ``[n, E+1]`` as half-split real ``[2n, E+1]``."""
    return torch.cat([rows.real, rows.imag])
