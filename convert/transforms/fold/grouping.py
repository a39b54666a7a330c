"""The partition of key/value heads into groups: relabeling heads is free, so any partition into equal parts is valid.

Candidates come from what pairs of heads lose by sharing: the error of their scores after a short fit, counted by how
much output a head's values carry. On a trained model that agreed with the error of the layer's output (correlations up
to 0.9 over partitions) where plain energies of keys and values hardly did. It is still an estimate, so the caller
supplies the judge that decides, such as the error of the attention output on held-out sequences.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfold.convert.transforms.fold import principal
from kvfold.convert.transforms.fold.heads import Objective, share_keys
from kvfold.convert.transforms.fold.moments import LayerMoments
from kvfold.convert.transforms.fold.score_fit import SCORES, fit_scores, score_losses
from kvfold.convert.transforms.linalg import among, metric_root
from kvfold.convert.transforms.weights import AttentionWeights

Partition = tuple[tuple[int, ...], ...]

PAIR_ROUNDS = 1
"""Rounds of the score fit for each pair of heads; the cost of grouping is proportional to them.

Excess loss of a trained model at 8 -> 2 heads (recipes/benchmarks/bench_constants.py): 0 and 1: 0.0559, 3: 0.0551.
"""

TINY = 1e-100


@dataclass(frozen=True)
class Choice:
    """The partition that the judge liked best, what it folds to, and every candidate's error."""

    groups: Partition
    weights: AttentionWeights
    errors: dict[Partition, float]


@dataclass(frozen=True)
class Pairs:
    """A layer's moments and what any two of its heads lose by sharing: the same for every number of groups."""

    layer: LayerMoments

    @cached_property
    def losses(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those of `pair_losses`, computed when they are first asked for."""
        return pair_losses(self.layer)


def contiguous(kv_heads: int, groups: int) -> Partition:
    """Neighboring heads share, in order. Raises ValueError when ``kv_heads`` does not divide by ``groups``."""
    if groups < 1 or kv_heads % groups:
        raise ValueError(f"groups: expected a divisor of {kv_heads} KV heads, found {groups}")
    size = kv_heads // groups
    return tuple(tuple(range(start, start + size)) for start in range(0, kv_heads, size))


def similar(
    pairs: Pairs, groups: int, judge: Callable[[AttentionWeights], float], objective: Objective = SCORES
) -> Choice:
    """The best of `candidates`, folded by `principal.fold` with ``objective``, as ``judge`` sees them.

    The candidates come from the errors of scores, whatever the objective: it decides how heads share, the judge who.
    """
    return choose(
        candidates(pairs, groups), judge, lambda partition: principal.fold_moments(pairs.layer, partition, objective)
    )


def candidates(pairs: Pairs, groups: int) -> list[Partition]:
    """A few distinct partitions worth judging; `contiguous` is always the first.

    The others come from greedy joining, then swaps, by the pairs' losses, one for each way to count heads.
    """
    kv_heads = pairs.layer.weights.kv_heads
    partitions = [contiguous(kv_heads, groups)]
    if groups in (1, kv_heads):
        return partitions
    for loss in pairs.losses:
        partition = _sorted(_swapped(loss, _greedy(loss, groups)))
        if partition not in partitions:
            partitions.append(partition)
    return partitions


def choose(
    partitions: Sequence[Partition],
    judge: Callable[[AttentionWeights], float],
    fold: Callable[[Partition], AttentionWeights],
) -> Choice:
    """The partition whose fold the judge gives the smallest error; the first of equals.

    Raises ValueError when there is none to choose from.
    """
    if not partitions:
        raise ValueError("partitions: expected at least one, found none")
    folds = {partition: fold(partition) for partition in partitions}
    errors = {partition: judge(folded) for partition, folded in folds.items()}
    best = min(errors, key=lambda partition: errors[partition])
    return Choice(best, folds[best], errors)


def pair_losses(layer: LayerMoments) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of any two KV heads by sharing, ``[G, G]`` each: shares of the layer's total, symmetric, diagonal 0.

    Score errors count by the energy of the values behind them; or relative to each head's own scores; or by the root of
    that energy. Errors of the values count in the output, the same each time.
    """
    lost, total = _score_losses(layer)
    value_lost, value_energy = _value_losses(layer)

    def together(emphasis: Tensor) -> Tensor:
        score = lost * emphasis / (total * emphasis).sum().clamp(min=TINY)
        return value_lost + (score + score.mT)

    return together(value_energy), together(1 / total.clamp(min=TINY)), together(value_energy.sqrt())


def _score_losses(layer: LayerMoments) -> tuple[Tensor, Tensor]:
    """``[G, G]``: the score error of head ``j``, all its queries, when it shares with ``i``; ``[G]``: its energy."""
    heads, pairs = layer.weights.kv_heads, layer.rotary.dims // 2
    lost, total = layer.moment.new_zeros(heads, heads), layer.moment.new_zeros(heads)
    for i, j in itertools.combinations(range(heads), 2):
        both = layer.group([i, j])
        start = share_keys(both.keys, both.member_queries, pairs).repeat_decode(layer.repeat)
        fitted = fit_scores(start, both.keys, both.queries, both.phi, pairs, rounds=PAIR_ROUNDS)
        losses = score_losses(fitted, both.keys, both.queries, both.phi, pairs)
        errors, energies = (torch.unflatten(part, 0, (2, -1)).sum(1) for part in losses)
        lost[j, i], lost[i, j] = errors
        total[[i, j]] = energies
    return lost, total


def _value_losses(layer: LayerMoments) -> tuple[Tensor, Tensor]:
    """``[G, G]``: the share of the layer's value energy that two heads lose; and ``[G]``: each head's value energy.

    The energy lost is what principal components beyond the first ``D`` hold; a head's own is that about its mean. Both
    are measured in the output.
    """
    heads, dims, metric = layer.weights.kv_heads, layer.weights.head_dim, layer.metric
    root, _ = metric_root(metric)
    moments = layer.joint_values.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    mean = layer.values @ layer.moment[-1]
    energy = (moments * metric).sum((1, 2))
    varying = energy - torch.einsum("ga,gab,gb->g", mean, metric, mean)
    lost = layer.moment.new_zeros(heads, heads)
    for i in range(heads - 1):
        joints = torch.stack([among(layer.joint_values, [i, j]) for j in range(i + 1, heads)])
        roots = torch.stack([root[[i, j]] for j in range(i + 1, heads)])
        stacked = torch.einsum("pjab,pjbkc,pkcd->pjakd", roots, joints, roots).flatten(3).flatten(1, 2)
        lost[i, i + 1 :] = torch.linalg.eigvalsh(stacked)[:, :dims].clamp(min=0).sum(1)
    return (lost + lost.mT) / energy.sum().clamp(min=TINY), varying.clamp(min=0)


def _greedy(loss: Tensor, groups: int) -> Partition:
    """Grows groups one at a time around the pair that loses least, always by the head that adds least."""
    table: list[list[float]] = loss.tolist()
    free, size = set(range(len(table))), len(table) // groups
    grown: list[tuple[int, ...]] = []
    while free:
        _, first, second = min((table[i][j], i, j) for i, j in itertools.combinations(sorted(free), 2))
        group = [first, second]
        while len(group) < size:
            rest = sorted(free - set(group))
            group.append(min(rest, key=lambda head: sum(table[head][other] for other in group)))
        grown.append(tuple(group))
        free -= set(group)
    return tuple(grown)


def _swapped(loss: Tensor, start: Partition) -> Partition:
    """Exchanges heads between groups while that lowers the summed losses within groups."""
    table: list[list[float]] = loss.tolist()
    groups = [list(group) for group in start]

    def inside(head: int, group: list[int]) -> float:
        return sum(table[head][other] for other in group if other != head)

    improved = True
    while improved:
        improved = False
        for first, second in itertools.combinations(groups, 2):
            for a, b in itertools.product(range(len(first)), range(len(second))):
                x, y = first[a], second[b]
                before = inside(x, first) + inside(y, second)
                after = inside(x, second) - table[x][y] + inside(y, first) - table[x][y]
                if after < before * (1 - 1e-9):
                    first[a], second[b] = y, x
                    improved = True
    return tuple(tuple(group) for group in groups)


def _sorted(partition: Partition) -> Partition:
    """The same partition, heads within groups and groups by their first head in order."""
    return tuple(sorted(tuple(sorted(group)) for group in partition))
