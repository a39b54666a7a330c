"""Which rotary keys multi-head latent attention keeps, and what stands in for the rotation of the others.

A rotary pair is one complex number per key head, ``k_{g,l}``; the heads' keys at one frequency may be mixed by any
complex matrix, because RoPE multiplies all of them by the same number. So at each frequency the principal complex
components over the heads are the best shared rotary keys. A *slot* ``(l, j)`` is the ``j``-th of them and takes 2
rotary dims.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary


@dataclass(frozen=True)
class Slots:
    """``counts[l]``.

    How many rotary keys at pair ``l``'s frequency, the same in every layer; ``theta [P/2]`` per slot.
    """

    counts: tuple[int, ...]
    theta: Tensor

    @property
    def rope_dim(self) -> int:
        return 2 * sum(self.counts)


@dataclass(frozen=True)
class PairKeys:
    """The rotating dims: ``keys [G, L, E+1]`` complex rows on ``[x; 1]``, ``asked [H, L]`` the energy of the queries.

    ``moment [E+1, E+1]`` of ``[x; 1]``.
    """

    keys: Tensor
    asked: Tensor
    moment: Tensor


@dataclass(frozen=True)
class LayerSurvey:
    """``energy [L, G]``: the energies of a layer's rotary components, descending, in units of squared scores.

    ``survives [L]``: the share of a pair's energy that its best constant stand-in keeps, ``|m|^2`` of ``pair_gains``.
    ``theta [L]`` the pairs' frequencies; all float64. ``L = 0`` for a layer that does not rotate.
    """

    energy: Tensor
    survives: Tensor
    theta: Tensor

    @property
    def worth(self) -> Tensor:
        """``[L, G]``: the score energy that each slot saves, relative to the layer's whole."""
        lost = self.energy * (1 - self.survives)[:, None]
        return lost / self.energy.sum().clamp_min(torch.finfo(lost.dtype).tiny)


def query_moment(weights: AttentionWeights, statistics: LayerStatistics, rotary: Rotary) -> Tensor:
    """``E[q q^T]`` of every head, ``[H, D, D]`` float64; the rotary amplitude is multiplied in."""
    rows = amplified(with_bias(weights.q, weights.q_bias), rotary)
    return rows @ second_moment(statistics).to(rows.device) @ rows.mT


def pair_keys(weights: AttentionWeights, statistics: LayerStatistics, rotary: Rotary, queries: Tensor) -> PairKeys:
    """``queries`` from ``query_moment``; the rotary amplitude is multiplied in."""
    half = rotary.dims // 2
    rows = amplified(with_bias(weights.k, weights.k_bias), rotary)
    energy = queries.diagonal(dim1=1, dim2=2).clamp_min(0)
    keys = torch.complex(rows[:, :half], rows[:, half : 2 * half])
    return PairKeys(keys, energy[:, :half] + energy[:, half : 2 * half], second_moment(statistics).to(rows.device))


def amplified(rows: Tensor, rotary: Rotary) -> Tensor:
    """``[heads, D, n]`` with the rotating dims times the rotary amplitude."""
    return torch.cat([rows[:, : rotary.dims] * rotary.amplitude, rows[:, rotary.dims :]], 1)


def second_moment(statistics: LayerStatistics) -> Tensor:
    """``E[[x; 1] [x; 1]^T]``, ``[E+1, E+1]`` float64."""
    mean = statistics.mean.double()
    one = mean.new_ones(1)
    top = torch.cat([statistics.gram.double(), mean[:, None]], 1)
    return torch.cat([top, torch.cat([mean, one])[None]])


def with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[heads, D, E]`` and ``[heads, D]`` as ``[heads, D, E+1]`` float64."""
    column = torch.zeros(weight.shape[:-1]) if bias is None else bias
    return torch.cat([weight.double(), column.to(weight.device).double()[..., None]], -1)


def query_scales(pairs: PairKeys) -> Tensor:
    """``s [G, L]``: the root of the energy of all queries that read key head ``g``, per pair; never quite zero."""
    energy = pairs.asked.reshape(len(pairs.keys), -1, pairs.asked.shape[1]).sum(1)
    floor = energy.max().clamp_min(torch.finfo(energy.dtype).tiny) * 1e-12 if energy.numel() else 0.0
    return energy.clamp_min(floor).sqrt()


def components(pairs: PairKeys) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``[L, G]``, descending, and eigenvectors ``[L, G, G]`` (columns) of a pair's weighted keys."""
    scaled = (query_scales(pairs)[..., None] * pairs.keys).transpose(0, 1)  # [L, G, E+1]
    spread = torch.complex(scaled.real @ pairs.moment, scaled.imag @ pairs.moment)
    covariance = spread @ scaled.mH
    values, vectors = torch.linalg.eigh((covariance + covariance.mH) / 2)
    return values.flip(-1).clamp_min(0), vectors.flip(-1)


def mixed_profile(statistics: LayerStatistics, uniform: float) -> Tensor:
    """``[H, S]``: the heads' distance profiles, mixed with ``uniform`` parts of an attention that sees all alike."""
    profile = statistics.profile.double()
    length = profile.shape[1]
    flat = torch.arange(length, 0, -1, dtype=torch.float64, device=profile.device)
    return (1 - uniform) * profile + uniform * flat / flat.sum()


FARTHEST = 8192
TAIL = 0.5
"""How much of the distances is a tail ``1 / (1 + delta)`` over the whole context; the rest is where attention looks."""


def over_context(statistics: LayerStatistics, context: int) -> LayerStatistics:
    """``statistics`` whose distance profiles reach as far as the model must see, not only as far as the text did.

    What is fitted to the distances of a short text alone fails at longer ones: unseen keys must keep their low scores.
    """
    profile = statistics.profile.double()
    reach = max(profile.shape[1], min(context, FARTHEST))
    tail = 1 / (1 + torch.arange(reach, dtype=torch.float64, device=profile.device))
    longer = torch.nn.functional.pad(profile, (0, reach - profile.shape[1]))
    return replace(statistics, profile=(1 - TAIL) * longer + TAIL * tail / tail.sum())


def pair_gains(statistics: LayerStatistics, rotary: Rotary, uniform: float = 0.5) -> Tensor:
    """``m [H, L]`` complex: what is left of each pair's rotation when one constant must stand in for it.

    ``m_{h,l} = sum_delta p_h(delta) e^{-i theta_l delta}`` with ``p`` of ``mixed_profile``.
    """
    profile = mixed_profile(statistics, uniform)
    distance = torch.arange(profile.shape[1], dtype=torch.float64, device=profile.device)
    angle = distance[:, None] * rotary.theta.to(profile.device)
    return profile.to(torch.complex128) @ torch.polar(torch.ones_like(angle), -angle)


def survey(weights: AttentionWeights, statistics: LayerStatistics, rotary: Rotary) -> LayerSurvey:
    """What ``choose_slots`` needs to know of one layer."""
    theta = rotary.theta.double().cpu()
    if not theta.numel():
        return LayerSurvey(torch.zeros(0, weights.kv_heads, dtype=torch.float64), torch.zeros_like(theta), theta)
    pairs = pair_keys(weights, statistics, rotary, query_moment(weights, statistics, rotary))
    energy, _ = components(pairs)
    share = pairs.asked.cpu()
    kept = pair_gains(statistics, rotary).abs().square().cpu()
    survives = (share * kept).sum(0) / share.sum(0).clamp_min(torch.finfo(share.dtype).tiny)
    return LayerSurvey(energy.cpu(), survives, theta)


def choose_slots(surveys: Sequence[LayerSurvey], rope_dim: int) -> Slots:
    """The ``rope_dim / 2`` slots worth most, summed over the layers; several may share a frequency.

    Frequencies are shared by all layers, so each layer keeps ``counts[l]`` components of its own at pair ``l``.
    """
    rotating = [item for item in surveys if item.theta.numel()]
    worth = torch.stack([item.worth for item in rotating]).sum(0)
    picked = worth.flatten().argsort(descending=True, stable=True)[: rope_dim // 2] // worth.shape[1]
    return _slots(torch.bincount(picked, minlength=worth.shape[0]).tolist(), rotating[0].theta)


def stride_slots(theta: Tensor, kv_heads: int, rope_dim: int) -> Slots:
    """Uniform stride over the pairs; beyond one slot per pair every pair gets one more, the rest again by stride."""
    pairs, slots = theta.numel(), rope_dim // 2
    whole, rest = divmod(slots, pairs)
    counts = [whole] * pairs
    for index in range(rest):
        counts[index * pairs // rest] += 1
    if max(counts) > kv_heads:
        raise ValueError(
            f"rope_dim: at most {2 * pairs * kv_heads} (2 x {pairs} pairs x {kv_heads} heads), found {rope_dim}"
        )
    return _slots(counts, theta)


def plain_slots(surveys: Sequence[LayerSurvey], rope_dim: int) -> Slots:
    """For readers that only know ``theta_i = base^(-2i/P)``: every ``step``-th pair, for the step that is worth most.

    Step 1 keeps the highest frequencies, the longest step spreads the slots over all of them.
    """
    theta = next(item.theta for item in surveys if item.theta.numel())
    slots = rope_dim // 2
    if slots > theta.numel():
        raise ValueError(f"rope_dim: at most {2 * theta.numel()}, one slot per frequency, found {rope_dim}")
    longest = max(1, (theta.numel() - 1) // max(1, slots - 1))
    offers = [_slots(_every(step, slots, theta.numel()), theta) for step in range(1, longest + 1)]
    return max(offers, key=lambda offer: slots_worth(surveys, offer))


def slots_worth(surveys: Sequence[LayerSurvey], slots: Slots) -> float:
    """The sum over layers of the share of score energy that ``slots`` save."""
    rows = (item.worth for item in surveys if item.theta.numel())
    return float(sum(row[pair, :count].sum() for row in rows for pair, count in enumerate(slots.counts)))


def _every(step: int, slots: int, pairs: int) -> list[int]:
    return [int(pair % step == 0 and pair // step < slots) for pair in range(pairs)]


def _slots(counts: Sequence[int], theta: Tensor) -> Slots:
    repeats = torch.tensor(counts, dtype=torch.long)
    return Slots(tuple(int(count) for count in counts), theta.double().cpu().repeat_interleave(repeats))
