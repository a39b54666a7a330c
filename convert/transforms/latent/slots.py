"""The rotary keys that multi-head latent attention keeps, and the constant gains that replace the
other rotations.

A rotary pair is one complex number per key head, ``k_{g,l}``; the heads' keys at one frequency may
be mixed by any complex matrix, because RoPE multiplies all of them by the same number. So at each
frequency the principal complex components over the heads are the best shared rotary keys. A *slot*
``(l, j)`` is the ``j``-th component at pair ``l`` and takes 2 rotary dims.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.convert.transforms.distances import average_rotation_factors, mix_distances
from kvfold.convert.transforms.latent.latent_weights import LayerProjections, build_projections
from kvfold.convert.transforms.linalg import (
    choose_moment_dtype,
    compute_covariance_root,
    compute_input_moment,
    decompose_symmetric,
    whiten_inputs,
)
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary

# Share of distances drawn from the full context in the gains. Excess loss of the reference MHA
# model at 48 + 16 after the least squares, nats per token (measured by a script in git history,
# 2026-11-22): 0: 0.0934, 0.25: 0.0937, 0.5: 0.0930, 0.75: 0.0927.
SLOT_UNIFORM = 0.5


@dataclass(frozen=True)
class RotarySlots:
    """The rotary keys that latent attention keeps: ``keys_per_pair[l]`` of them at the frequency of
    rotary pair ``l``. ``theta [P/2]`` is the frequency of each key in radians per position.
    """

    keys_per_pair: tuple[int, ...]
    theta: Tensor

    @property
    def rope_dim(self) -> int:
        """The number of rotary dims ``P``, two for each key."""
        return 2 * sum(self.keys_per_pair)


NO_SLOTS = RotarySlots((), torch.empty(0, dtype=torch.float64))


@dataclass(frozen=True)
class PairComponents:
    """The rotary pairs of a layer's keys as complex numbers, and their principal components over
    the heads.

    keys: ``[G, L, E+1]``, complex rows on whitened ``[z; 1]``
    query_energy: ``[H, L] = E|q_{h,l}|^2``
    scales: ``[G, L]``, the root of the energy of all queries that read a key head
    energy, vectors: ``[L, G]`` and ``[L, G, G]`` (columns), the eigenvalues, descending, and the
        eigenvectors of the second moment of ``scales * keys``
    """

    keys: Tensor
    query_energy: Tensor
    scales: Tensor
    energy: Tensor
    vectors: Tensor


@dataclass(frozen=True)
class LayerSurvey:
    """How much of a layer's score energy each possible rotary slot preserves.

    worth: ``[L, G]``, the score energy that each slot preserves, relative to the layer's total;
        descending along ``G``
    theta: ``[L]``, the pairs' frequencies; ``L = 0`` for a layer that does not rotate
    """

    worth: Tensor
    theta: Tensor


def compute_pair_components(projections: LayerProjections, queries: Tensor) -> PairComponents:
    """Return the principal components over heads of each rotary pair of the keys of
    ``projections``, whose inputs are white (`linalg.whiten_inputs`). ``queries [H, D, D]``: second
    moments of the queries.
    """
    half = projections.rotary.dims // 2
    energy = queries.diagonal(dim1=1, dim2=2).clamp_min(0)
    energy = energy[:, :half] + energy[:, half : 2 * half]
    keys = torch.complex(projections.keys[:, :half], projections.keys[:, half : 2 * half])
    scales = torch.unflatten(energy, 0, (len(keys), -1)).sum(1)
    # Keys are divided by their scales later: the floor keeps heads that no query reads finite.
    scales = scales.clamp_min(scales.max().clamp_min(torch.finfo(scales.dtype).tiny) * 1e-12).sqrt()
    scaled = (scales[..., None] * keys).transpose(0, 1)  # [L, G, E+1]
    return PairComponents(keys, energy, scales, *decompose_symmetric(scaled @ scaled.mH))


def split_rotary_keys(
    projections: LayerProjections, slots: RotarySlots, queries: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a layer's keys into shared rotary keys for ``slots``, ``[P, E+1]``, each head's
    up-projection of these, ``[H, D, P]``, and the remaining keys ``[G, D, E+1]``. ``projections``
    and ``queries`` as in `compute_pair_components`.
    """
    rotary = projections.rotary.dims
    up_keys = projections.keys.new_zeros(*projections.queries.shape[:2], slots.rope_dim)
    if not rotary:
        return (
            projections.keys.new_zeros(slots.rope_dim, projections.keys.shape[-1]),
            up_keys,
            projections.keys,
        )
    pairs = compute_pair_components(projections, queries)
    left = pairs.keys.clone()
    maps = left.new_zeros(*left.shape[:2], slots.rope_dim // 2)  # [G, L, P/2]
    shared: list[Tensor] = []
    for pair, count in enumerate(slots.keys_per_pair):
        scale = pairs.scales[:, pair, None]
        basis = pairs.vectors[pair, :, :count]
        components = basis.mH @ (scale * left[:, pair])
        factors = basis / scale
        left[:, pair] -= factors @ components
        # Keeps the shared keys in the units of the source's.
        unit = scale.square().mean().sqrt()
        maps[:, pair, len(shared) : len(shared) + count] = factors * unit
        shared.extend(components / unit)
    rope_key = torch.stack(shared)
    rest = torch.cat([left.real, left.imag, projections.keys[:, rotary:]], 1)
    # From the real parts of the shared keys, then from their imaginary parts.
    columns = torch.cat([maps, 1j * maps], 2).repeat_interleave(
        projections.query_heads_per_kv_head, 0
    )
    up_keys[:, :rotary] = torch.cat([columns.real, columns.imag], 1)
    return torch.cat([rope_key.real, rope_key.imag]), up_keys, rest


def compute_pair_gains(statistics: LayerStatistics, rotary: Rotary, context: int) -> Tensor:
    """Return the constants ``[H, L]``, complex, that best replace the rotation of each pair: the
    mean of ``e^{-i theta_l delta}`` over the distances ``delta`` of a head.
    """
    return average_rotation_factors(
        mix_distances(statistics.profile, context, SLOT_UNIFORM), rotary.theta
    )


def survey_layer(
    weights: AttentionWeights, statistics: LayerStatistics, rotary: Rotary, context: int = 0
) -> LayerSurvey:
    """Return how much score energy each possible rotary slot of a layer preserves. The layer has no
    norms on queries and keys; ``context`` is the number of positions to support.
    """
    theta = rotary.theta.double().cpu()
    if not theta.numel():
        return LayerSurvey(theta.new_zeros(0, weights.kv_heads), theta)
    moment = compute_input_moment(statistics)
    root = compute_covariance_root(moment)
    projections = build_projections(weights, statistics, rotary, 1.0)
    dtype = choose_moment_dtype(len(root))
    queries = whiten_inputs(projections.queries, root, moment[-1], dtype)
    projections = replace(
        projections, keys=whiten_inputs(projections.keys, root, moment[-1], dtype)
    )
    pairs = compute_pair_components(projections, queries @ queries.mT)
    # The best constant in place of a rotation preserves this share of a pair's energy.
    retained = compute_pair_gains(statistics, rotary, context).abs().square()
    share = pairs.query_energy
    tiny = torch.finfo(share.dtype).tiny
    survives = (share * retained).sum(0) / share.sum(0).clamp_min(tiny)
    lost = pairs.energy * (1 - survives)[:, None]
    return LayerSurvey((lost / pairs.energy.sum().clamp_min(tiny)).cpu(), theta)


def average_surveys(surveys: Sequence[LayerSurvey]) -> LayerSurvey:
    """Return the mean survey of the layers that have rotary embedding; at least one must."""
    rotating = [survey for survey in surveys if survey.theta.numel()]
    worth = torch.stack([survey.worth for survey in rotating]).mean(0)
    return LayerSurvey(worth, rotating[0].theta)


def choose_rotary_slots(surveys: Sequence[LayerSurvey], rope_dim: int) -> RotarySlots:
    """Return the ``rope_dim / 2`` slots that preserve the most score energy, averaged over
    the layers of ``surveys``; several may share a frequency.

    These layers use the same frequencies: each keeps its first ``keys_per_pair[l]`` components at
    pair ``l``.
    """
    mean = average_surveys(surveys)
    pairs, heads = mean.worth.shape
    # Eigenvalues descend, so the picked slots of a pair are always its first ones.
    picked = mean.worth.flatten().argsort(descending=True, stable=True)[: rope_dim // 2] // heads
    return _make_rotary_slots(torch.bincount(picked, minlength=pairs).tolist(), mean.theta)


def choose_stepped_rotary_slots(surveys: Sequence[LayerSurvey], rope_dim: int) -> RotarySlots:
    """Return the best slots for engines that only support ``theta_i = base^(-2i/P)``: every
    ``step``-th rotary pair, for the best step.

    Step 1 keeps the highest frequencies; the largest step spreads the slots over all frequencies.
    """
    mean = average_surveys(surveys)
    pairs = len(mean.worth)
    slots = rope_dim // 2
    longest = max(1, (pairs - 1) // max(1, slots - 1))
    first = mean.worth[:, 0]
    step = max(range(1, longest + 1), key=lambda step: float(first[::step][:slots].sum()))
    chosen = range(0, pairs, step)[:slots]
    return _make_rotary_slots([int(pair in chosen) for pair in range(pairs)], mean.theta)


def spread_rotary_slots(theta: Tensor, rope_dim: int) -> RotarySlots:
    """Return ``rope_dim / 2`` slots at a uniform stride over the rotary pairs with frequencies
    ``theta [L]``; with more slots than pairs, each pair gets equally many.
    """
    pairs = theta.numel()
    per_pair, rest = divmod(rope_dim // 2, pairs)
    keys_per_pair = [per_pair] * pairs
    for index in range(rest):
        keys_per_pair[index * pairs // rest] += 1
    return _make_rotary_slots(keys_per_pair, theta)


def _make_rotary_slots(keys_per_pair: Sequence[int], theta: Tensor) -> RotarySlots:
    """Return slots with ``keys_per_pair[l]`` rotary keys at frequency ``theta[l]``."""
    return RotarySlots(
        tuple(keys_per_pair), theta.double().cpu().repeat_interleave(torch.tensor(keys_per_pair))
    )
