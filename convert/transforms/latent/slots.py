"""The rotary keys that multi-head latent attention keeps, and the constant gains that replace the
other rotations.

A rotary pair is one complex number per key head, ``k_{g,l}``; the heads' keys at one frequency may
be mixed by any complex matrix, because RoPE multiplies all of them by the same number. So at each
frequency the principal complex components over the heads are the best shared rotary keys. A *slot*
``(l, j)`` is the ``j``-th component at pair ``l`` and takes 2 rotary dims.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.convert.transforms.distances import mix_distances, rotation_gains
from kvfold.convert.transforms.latent.latent_weights import LinearLayer, linear_layer
from kvfold.convert.transforms.linalg import head_moments, input_moment, symmetric_eig
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary

# Share of distances drawn from the full context in the gains. Excess loss of the reference MHA
# model at 48 + 16 after the least squares, nats per token (bench_constants.py,
# 2026-11-22): 0: 0.0934, 0.25: 0.0937, 0.5: 0.0930, 0.75: 0.0927.
SLOT_UNIFORM = 0.5


@dataclass(frozen=True)
class Slots:
    """``counts[l]`` rotary keys at the frequency of pair ``l``; ``theta [P/2]``: the frequency of
    each key.
    """

    counts: tuple[int, ...]
    theta: Tensor

    @property
    def rope_dim(self) -> int:
        return 2 * sum(self.counts)


NO_SLOTS = Slots((), torch.empty(0, dtype=torch.float64))


@dataclass(frozen=True)
class PairComponents:
    """The rotary pairs of a layer's keys and their principal components over the heads.

    ``keys [G, L, E+1]``: complex rows on ``[x; 1]``. ``query_energy [H, L]``: ``E|q_{h,l}|^2``.
    ``scales [G, L]``: the root of the energy of all queries that read a key head. ``energy [L, G]``
    and ``vectors [L, G, G]`` (columns): the eigenvalues, descending, and the eigenvectors of the
    second moment of ``scales * keys``.
    """

    keys: Tensor
    query_energy: Tensor
    scales: Tensor
    energy: Tensor
    vectors: Tensor


@dataclass(frozen=True)
class RotarySplit:
    """Slots' keys ``rows [P, E+1]``, each head's map ``reading [H, D, P]`` from them, the ``rest
    [G, D, E+1]``.
    """

    rows: Tensor
    reading: Tensor
    rest: Tensor


@dataclass(frozen=True)
class LayerSurvey:
    """``energy [L, G]``: the energies of a layer's rotary components, descending, in units of
    squared scores.

    ``survives [L]``: the share of a pair's energy preserved by the best constant in place of its
    rotation, ``|m|^2`` from ``pair_gains``. ``theta [L]``: the pairs' frequencies. All float64; ``L
    = 0`` for a layer that does not rotate.
    """

    energy: Tensor
    survives: Tensor
    theta: Tensor

    @property
    def worth(self) -> Tensor:
        """The score energy that each slot preserves, relative to the layer's total: ``[L, G]``."""
        lost = self.energy * (1 - self.survives)[:, None]
        return lost / self.energy.sum().clamp_min(torch.finfo(lost.dtype).tiny)


def pair_components(
    layer: LinearLayer, queries: Tensor, moment: Tensor, rotary: Rotary
) -> PairComponents:
    """The rotary components of ``layer``; ``queries [H, D, D]`` and ``moment [E+1, E+1]`` are
    second moments.
    """
    half = rotary.dims // 2
    energy = queries.diagonal(dim1=1, dim2=2).clamp_min(0)
    energy = energy[:, :half] + energy[:, half : 2 * half]
    keys = torch.complex(layer.keys[:, :half], layer.keys[:, half : 2 * half])
    scales = torch.unflatten(energy, 0, (len(keys), -1)).sum(1)
    # Keys are divided by their scales later: the floor keeps heads that no query reads finite.
    scales = scales.clamp_min(scales.max().clamp_min(torch.finfo(scales.dtype).tiny) * 1e-12).sqrt()
    scaled = (scales[..., None] * keys).transpose(0, 1)  # [L, G, E+1]
    spread = torch.complex(scaled.real @ moment, scaled.imag @ moment)
    return PairComponents(keys, energy, scales, *symmetric_eig(spread @ scaled.mH))


def split_rotary(
    layer: LinearLayer, rotary: Rotary, slots: Slots, queries: Tensor, moment: Tensor
) -> RotarySplit:
    """Split keys into the slots' shared keys, each head's map from these, and the rest; see
    `pair_components`.
    """
    half = rotary.dims // 2
    keys = layer.keys
    reading = keys.new_zeros(*layer.queries.shape[:2], slots.rope_dim)
    if not half:
        return RotarySplit(keys.new_zeros(slots.rope_dim, keys.shape[-1]), reading, keys)
    pairs = pair_components(layer, queries, moment, rotary)
    shared: list[Tensor] = []
    left_over: list[Tensor] = []
    slot = 0
    total = slots.rope_dim // 2
    for pair, count in enumerate(slots.counts):
        key = pairs.keys[:, pair]
        scale = pairs.scales[:, pair]
        basis = pairs.vectors[pair, :, :count]
        # [count, E+1], [G, count]
        top = basis.mH @ (scale[:, None] * key)
        factor = basis / scale[:, None]
        left_over.append(key - factor @ top)
        unit = scale.square().mean().sqrt()  # keeps the shared keys in the units of the source's
        shared.append(top / unit)
        # A complex factor on a half-split pair is the matrix [[a, -b], [b, a]].
        factor = (factor * unit).repeat_interleave(layer.group, 0)  # [H, count]
        real = slice(slot, slot + count)
        imaginary = slice(total + slot, total + slot + count)
        reading[:, pair, real] = reading[:, half + pair, imaginary] = factor.real
        reading[:, half + pair, real] = factor.imag
        reading[:, pair, imaginary] = -factor.imag
        slot += count
    left = torch.stack(left_over, 1)  # [G, L, E+1]
    rest = torch.cat([left.real, left.imag, keys[:, rotary.dims :]], 1)
    rows = torch.cat(shared)
    return RotarySplit(torch.cat([rows.real, rows.imag]), reading, rest)


def apply_gains(keys: Tensor, gains: Tensor, rotary: Rotary) -> Tensor:
    """Repeat ``keys [G, D, n]`` for every query head, ``[H, D, n]``, with rotary pairs times their
    gain ``m_{h,l}``.
    """
    half = rotary.dims // 2
    per_head = keys.repeat_interleave(gains.shape[0] // keys.shape[0], 0)
    real = per_head[:, :half]
    imaginary = per_head[:, half : 2 * half]
    still = per_head[:, 2 * half :]
    a = gains.real[..., None]
    b = gains.imag[..., None]
    return torch.cat([a * real - b * imaginary, a * imaginary + b * real, still], 1)


def pair_gains(statistics: LayerStatistics, rotary: Rotary, context: int) -> Tensor:
    """``m_{h,l} = sum_delta p_h(delta) e^{-i theta_l delta}``, complex ``[H, L]``: the best
    constants for rotations.
    """
    return rotation_gains(mix_distances(statistics.profile, context, SLOT_UNIFORM), rotary.theta)


def survey_layer(
    weights: AttentionWeights, statistics: LayerStatistics, rotary: Rotary, context: int = 0
) -> LayerSurvey:
    """Measure one layer's rotary energies for ``choose_slots``; ``context``: the number of
    positions to support.
    """
    theta = rotary.theta.double().cpu()
    # A layer without rotation does not affect the choice of slots.
    if not theta.numel():
        return LayerSurvey(
            torch.zeros(0, weights.kv_heads, dtype=torch.float64), torch.zeros_like(theta), theta
        )
    statistics = statistics.to(weights.q.device)
    moment = input_moment(statistics)
    layer = linear_layer(weights, rotary, 1.0)
    pairs = pair_components(layer, head_moments(layer.queries, moment), moment, rotary)
    retained = pair_gains(statistics, rotary, context).abs().square()
    share = pairs.query_energy
    survives = (share * retained).sum(0) / share.sum(0).clamp_min(torch.finfo(share.dtype).tiny)
    return LayerSurvey(pairs.energy.cpu(), survives.cpu(), theta)


def mean_worth(surveys: Sequence[LayerSurvey]) -> Tensor:
    """The worth of each slot ``[L, G]``, averaged over the layers that rotate; at least one layer
    must rotate.
    """
    return torch.stack([item.worth for item in surveys if item.theta.numel()]).mean(0)


def choose_slots(surveys: Sequence[LayerSurvey], rope_dim: int) -> Slots:
    """Choose the ``rope_dim / 2`` slots with the greatest worth over all layers; several may share
    a frequency.

    All layers use the same frequencies: each keeps its first ``counts[l]`` components at pair
    ``l``.
    """
    if not rope_dim:
        return NO_SLOTS
    worth = mean_worth(surveys)
    theta = next(item.theta for item in surveys if item.theta.numel())
    # Eigenvalues descend, so the picked slots of a pair are always its first ones.
    picked = (
        worth.flatten().argsort(descending=True, stable=True)[: rope_dim // 2] // worth.shape[1]
    )
    return _slots(torch.bincount(picked, minlength=worth.shape[0]).tolist(), theta)


def plain_slots(surveys: Sequence[LayerSurvey], rope_dim: int) -> Slots:
    """Slots for engines that only support ``theta_i = base^(-2i/P)``: every ``step``-th pair, for
    the best step.

    Step 1 keeps the highest frequencies; the largest step spreads the slots over all frequencies.
    """
    worth = mean_worth(surveys)
    theta = next(item.theta for item in surveys if item.theta.numel())
    pairs = len(worth)
    slots = rope_dim // 2
    longest = max(1, (pairs - 1) // max(1, slots - 1))
    step = max(range(1, longest + 1), key=lambda step: float(worth[::step][:slots, 0].sum()))
    return _slots([int(pair % step == 0 and pair // step < slots) for pair in range(pairs)], theta)


def stride_slots(theta: Tensor, rope_dim: int) -> Slots:
    """Slots at a uniform stride over the pairs; if there are more slots than pairs, each first gets
    equally many.
    """
    pairs = theta.numel()
    per_pair, rest = divmod(rope_dim // 2, pairs)
    counts = [per_pair] * pairs
    for index in range(rest):
        counts[index * pairs // rest] += 1
    return _slots(counts, theta)


def _slots(counts: Sequence[int], theta: Tensor) -> Slots:
    return Slots(tuple(counts), theta.double().cpu().repeat_interleave(torch.tensor(counts)))
