"""The partition of key/value heads into groups: relabeling heads is free, so any partition into equal parts is valid.

Candidates come from what pairs of heads lose by sharing: the error of their scores after a short fit, counted by how
much output a head's values carry. On a trained model that agreed with the error of the layer's output (correlations up
to 0.9 over partitions) where plain energies of keys and values hardly did. It is still an estimate, so the caller
supplies the judge that decides, such as the error of the attention output on held-out sequences.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfold.convert.transforms.fold import principal
from kvfold.convert.transforms.fold.heads import Objective
from kvfold.convert.transforms.fold.principal import LayerMoments
from kvfold.convert.transforms.fold.score_fit import SCORES, fit_scores, principal_keys, score_losses
from kvfold.convert.transforms.linalg import metric_root
from kvfold.convert.transforms.weights import AttentionWeights

Partition = tuple[tuple[int, ...], ...]

# Rounds of the score fit for each pair of heads; the cost of grouping is proportional to them. Excess loss of the
# reference MHA model at 8 -> 2 heads (recipes/benchmarks/bench_constants.py): 0 and 1: 0.0559, 3: 0.0551.
PAIR_ROUNDS = 1

# Keeps 0 / 0 of heads without energy at 0; far below any energy of trained weights.
TINY = 1e-100


@dataclass(frozen=True)
class ChosenPartition:
    """The partition with the smallest error, the weights folded by it, and the error of every candidate."""

    groups: Partition
    weights: AttentionWeights
    errors: dict[Partition, float]


@dataclass(frozen=True)
class Pairs:
    """A layer's moments and the loss of any two heads that share: the same for every number of groups."""

    layer: LayerMoments

    @cached_property
    def losses(self) -> tuple[Tensor, Tensor, Tensor]:
        """Three estimates of what two KV heads lose by sharing, ``[G, G]`` each: symmetric, diagonal 0, shares of 1.

        They weight the score errors by the energy of the head's values, by the inverse of its score energy, or by the
        square root of the value energy. The error of the values, measured in the layer's output, is added to each.
        Computed at the first use: a single candidate needs none.
        """
        lost, total = _score_losses(self.layer)
        value_lost, value_energy = _value_losses(self.layer)
        losses = []
        for emphasis in (value_energy, 1 / total.clamp(min=TINY), value_energy.sqrt()):
            score = lost * emphasis / (total * emphasis).sum().clamp(min=TINY)
            losses.append(value_lost + (score + score.mT))
        return losses[0], losses[1], losses[2]


def contiguous(kv_heads: int, groups: int) -> Partition:
    """Neighboring heads share, in order. Raises ValueError when ``kv_heads`` does not divide by ``groups``."""
    if groups < 1 or kv_heads % groups:
        raise ValueError(f"groups: {groups} must divide {kv_heads} KV heads")
    size = kv_heads // groups
    return tuple(tuple(range(start, start + size)) for start in range(0, kv_heads, size))


def similar(
    pairs: Pairs, groups: int, judge: Callable[[AttentionWeights], float], objective: Objective = SCORES
) -> ChosenPartition:
    """The partition of `candidates` whose fold with ``objective`` has the smallest error by ``judge``; first of equals.

    Candidates come from score errors whatever the objective, which decides how heads share, not which of them.
    """
    folds = {each: principal.fold_moments(pairs.layer, each, objective) for each in candidates(pairs, groups)}
    errors = {partition: judge(folded) for partition, folded in folds.items()}
    best = min(errors, key=lambda partition: errors[partition])
    return ChosenPartition(best, folds[best], errors)


def candidates(pairs: Pairs, groups: int) -> list[Partition]:
    """A few distinct partitions worth judging; `contiguous` is always the first.

    The others come from greedy joining, then swaps, by the pairs' losses, one for each way to count heads.
    """
    kv_heads = pairs.layer.weights.kv_heads
    partitions = [contiguous(kv_heads, groups)]
    if groups in (1, kv_heads):
        return partitions
    # Estimates only: each way to weigh heads is right for some layers, so the judge sees a candidate of each.
    for loss in pairs.losses:
        swapped = _swapped(loss, _greedy(loss, groups))
        partition = tuple(sorted(tuple(sorted(group)) for group in swapped))  # one spelling for equal partitions
        if partition not in partitions:
            partitions.append(partition)
    return partitions


def _score_losses(layer: LayerMoments) -> tuple[Tensor, Tensor]:
    """``[G, G]``: the score error of head ``j``, all its queries, when it shares with ``i``; ``[G]``: its energy."""
    heads = layer.weights.kv_heads
    lost, total = layer.moment.new_zeros(heads, heads), layer.moment.new_zeros(heads)
    for i, j in itertools.combinations(range(heads), 2):
        both = layer.group([i, j])
        losses = score_losses(fit_scores(principal_keys(both), both, PAIR_ROUNDS), both)
        errors, energies = (torch.unflatten(part, 0, (2, -1)).sum(1) for part in losses)
        lost[j, i], lost[i, j] = errors
        total[[i, j]] = energies
    return lost, total


def _value_losses(layer: LayerMoments) -> tuple[Tensor, Tensor]:
    """``[G, G]``: the share of the output's energy that two heads' values lose; ``[G]``: each head's energy."""
    heads, dims, metric = layer.weights.kv_heads, layer.weights.head_dim, layer.metric
    root, _ = metric_root(metric)
    moments = layer.joint_values.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    mean = layer.values @ layer.moment[-1]
    energy = (moments * metric).sum((1, 2))
    varying = energy - torch.einsum("ga,gab,gb->g", mean, metric, mean)
    lost = layer.moment.new_zeros(heads, heads)
    # What two heads lose is in the principal components beyond the first D of both together.
    for i in range(heads - 1):
        joints = torch.stack([layer.joint_values[[i, j]][:, :, [i, j]] for j in range(i + 1, heads)])
        roots = torch.stack([root[[i, j]] for j in range(i + 1, heads)])
        stacked = torch.einsum("pjab,pjbkc,pkcd->pjakd", roots, joints, roots).flatten(3).flatten(1, 2)
        lost[i, i + 1 :] = torch.linalg.eigvalsh(stacked)[:, :dims].clamp(min=0).sum(1)
    return (lost + lost.mT) / energy.sum().clamp(min=TINY), varying.clamp(min=0)


def _greedy(loss: Tensor, groups: int) -> Partition:
    """Groups made one after the other: the free pair that loses least, then always the head that adds least."""
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
    """``start`` after exchanges of heads between groups, as long as one lowers the sum of losses within groups."""
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
