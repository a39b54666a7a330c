"""Which key/value heads share one: relabelling heads is free, so any partition into equal groups is a valid fold.

Candidates come from energies (what a pair of heads would lose by sharing), which is cheap but no faithful yardstick of
the layer's output; the last word has a judge that the caller supplies, such as the error of the attention output on
sequences kept aside.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.convert.transforms import normed
from kvfold.convert.transforms.linalg import input_moment, joint_moment, with_bias
from kvfold.convert.transforms.principal_keys import share_keys
from kvfold.convert.transforms.principal_values import output_metric, share_values
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary

Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Choice:
    """The partition that the judge liked best, what it folds to, and every candidate's error."""

    groups: Partition
    weights: AttentionWeights
    errors: dict[Partition, float]


def contiguous(kv_heads: int, groups: int) -> Partition:
    """Neighbouring heads share, in order. Raises ValueError when ``kv_heads`` does not divide by ``groups``."""
    if groups < 1 or kv_heads % groups:
        raise ValueError(f"groups: expected a divisor of {kv_heads} KV heads, found {groups}")
    size = kv_heads // groups
    return tuple(tuple(range(start, start + size)) for start in range(0, kv_heads, size))


def candidates(weights: AttentionWeights, statistics: LayerStatistics, rotary: Rotary, groups: int) -> list[Partition]:
    """A few distinct partitions worth judging; `contiguous` is always the first.

    Found by greedy joining and then swaps, by what pairs of heads lose in keys, in values, and in both together.
    """
    plain = contiguous(weights.kv_heads, groups)
    if groups in (1, weights.kv_heads):
        return [plain]
    keys, values = pair_losses(weights, statistics, rotary)
    found = [plain]
    for loss in (keys + values, keys, values):
        for start in (_greedy(loss, groups), plain):
            partition = _canonical(_improve(loss, start))
            if partition not in found:
                found.append(partition)
    return found


def choose(
    partitions: Sequence[Partition],
    judge: Callable[[AttentionWeights], float],
    fold: Callable[[Partition], AttentionWeights],
) -> Choice:
    """The partition whose fold the judge gives the smallest error; the first of equals. Needs at least one."""
    errors: dict[Partition, float] = {}
    best: tuple[Partition, AttentionWeights] | None = None
    for partition in partitions:
        folded = fold(partition)
        error = judge(folded)
        if best is None or error < errors[best[0]]:
            best = (partition, folded)
        errors[partition] = error
    if best is None:
        raise ValueError("partitions: expected at least one, found none")
    return Choice(*best, errors)


def pair_losses(weights: AttentionWeights, statistics: LayerStatistics, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Shares of the layer's key and value energy that two heads lose by sharing: two ``[G, G]``, zero diagonal."""
    moment = input_moment(statistics).to(weights.q.device)
    keys = normed.linearise(with_bias(weights.k, weights.k_bias), weights.k_norm, moment).affine
    queries = normed.linearise(with_bias(weights.q, weights.q_bias), weights.q_norm, moment).affine
    asked = torch.unflatten((queries @ moment) @ queries.mT, 0, (weights.kv_heads, -1)).sum(1)
    key_moment = joint_moment(keys, moment)
    value_moment = joint_moment(with_bias(weights.v, weights.v_bias), moment)
    metric = output_metric(weights.o, weights.kv_heads)
    lost = torch.zeros(2, weights.kv_heads, weights.kv_heads, dtype=torch.float64)
    held = torch.zeros(2, dtype=torch.float64)  # every head's energy, G - 1 times
    for i, j in itertools.combinations(range(weights.kv_heads), 2):
        pair = [i, j]
        key = share_keys(key_moment[pair][:, :, pair], asked[pair], rotary.dims // 2)
        value = share_values(value_moment[pair][:, :, pair], metric[pair])
        lost[:, i, j] = lost[:, j, i] = torch.tensor([key.lost, value.lost], dtype=torch.float64)
        held += torch.tensor([key.total, value.total], dtype=torch.float64)
    shares = lost * (weights.kv_heads - 1) / held.clamp_min(torch.finfo(held.dtype).tiny)[:, None, None]
    return shares[0], shares[1]


def _greedy(loss: Tensor, groups: int) -> Partition:
    """Fill one group after another: the cheapest pair of heads left, then whoever joins it most cheaply."""
    left = set(range(len(loss)))
    size = len(loss) // groups
    found = []
    for _ in range(groups):
        pairs = itertools.combinations(sorted(left), 2)
        group = list(min(pairs, key=lambda pair: float(loss[pair])))
        while len(group) < size:
            outside = sorted(left.difference(group))
            group.append(min(outside, key=lambda head: float(loss[head, group].sum())))
        left.difference_update(group)
        found.append(tuple(group))
    return tuple(found)


def _improve(loss: Tensor, start: Partition) -> Partition:
    """Exchange two heads of different groups as long as the groups' summed pair losses fall."""
    groups = [list(group) for group in start]
    while (swap := _best_swap(loss, groups)) is not None:
        one, i, other, j = swap
        groups[one][i], groups[other][j] = groups[other][j], groups[one][i]
    return tuple(tuple(group) for group in groups)


def _best_swap(loss: Tensor, groups: list[list[int]]) -> tuple[int, int, int, int] | None:
    """The exchange that saves most: group, place in it, other group, place in that; None when none saves anything."""
    best, saved = None, 1e-12
    for one, other in itertools.combinations(range(len(groups)), 2):
        mine, theirs = groups[one], groups[other]
        own, across = loss[mine][:, mine].sum(1), loss[mine][:, theirs].sum(1)  # what mine lose at home, and away
        home, away = loss[theirs][:, theirs].sum(1), loss[theirs][:, mine].sum(1)
        gain = (own - across)[:, None] + (home - away)[None] + 2 * loss[mine][:, theirs]
        most = int(gain.argmax())
        i, j = divmod(most, len(theirs))
        if float(gain[i, j]) > saved:
            best, saved = (one, i, other, j), float(gain[i, j])
    return best


def _canonical(groups: Partition) -> Partition:
    """Members in order, groups by their first member: equal partitions compare equal."""
    return tuple(sorted(tuple(sorted(group)) for group in groups))
