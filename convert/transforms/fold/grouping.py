"""Partitions of key/value heads into groups. Relabeling heads is free, so any partition into equal
parts is valid.

Candidates are based on the loss of each pair of heads that share: the error of their scores after a
short fit, weighted by the output energy of the heads' values. On a trained model this agreed with
the error of the layer's output (correlations up to 0.9 over partitions), whereas plain energies of
keys and values hardly did. It is still an estimate, so the error of the attention output on
held-out sequences decides (`methods.fold`).
"""

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfold.convert.transforms.fold.heads import (
    GroupMoments,
    apply_metric_root,
    compute_score_errors_and_energies,
    fit_scores,
    share_keys,
)
from kvfold.convert.transforms.fold.principal import LayerMoments
from kvfold.convert.transforms.linalg import compute_metric_roots

Partition = tuple[tuple[int, ...], ...]

# Rounds of the score fit for each pair of heads; the cost of grouping is proportional to them.
# Excess loss of the reference MHA model at 8 -> 2 heads (measured by a script in git history,
# 2026-11-22): 0 and 1: 0.0559, 3: 0.0551.
PAIR_ROUNDS = 1

# Makes 0 / 0 for heads without energy equal 0; far below any energy of trained weights.
TINY = 1e-100


@dataclass(frozen=True)
class PairLosses:
    """Estimates of what is lost if any two key/value heads of a layer share one head; they apply to
    any number of groups.
    """

    layer_moments: LayerMoments

    @cached_property
    def head_moments(self) -> GroupMoments:
        """The second moments of all heads, computed at first use."""
        return self.layer_moments.measure_heads(range(self.layer_moments.weights.kv_heads))

    @cached_property
    def loss_estimates(self) -> list[Tensor]:
        """Two estimates of the loss if two KV heads share one: matrices ``[G, G]``, symmetric,
        diagonal 0, as shares of the energy.

        They weight the score errors by the energy of the head's values, or by the inverse of its
        score energy. The error of the values, measured in the layer's output, is added to each.
        Computed at first use, because a single candidate does not need them.
        """
        moment = self.layer_moments.moment
        moments = self.head_moments
        heads = len(moments.keys)
        pairs = torch.combinations(torch.arange(heads, device=moment.device))
        # Many pairs at once, because a device waits for every decomposition; not all of them, to
        # limit memory.
        roots, _ = compute_metric_roots(moments.metric)
        measure_pairs = torch.vmap(self._measure_pair, in_dims=(0, None), chunk_size=heads)
        errors, energies, value_errors = measure_pairs(pairs, roots)
        first, second = pairs.unbind(1)
        score_lost = moment.new_zeros(heads, heads)  # [j, i]: of i's queries, shared with j
        score_lost[second, first], score_lost[first, second] = errors.unbind(1)
        score_energy = moment.new_zeros(heads)
        score_energy[pairs] = energies
        value_lost = torch.zeros_like(score_lost)
        value_lost[first, second] = value_errors
        mean = self.layer_moments.values @ moment[-1]
        value_energy = torch.einsum("gagb,gab->g", moments.values, moments.metric)
        constant = torch.einsum("ga,gab,gb->g", mean, moments.metric, mean)
        varying = (value_energy - constant).clamp(min=0)
        value_lost = (value_lost + value_lost.mT) / value_energy.sum().clamp(min=TINY)
        losses = []
        for emphasis in (varying, 1 / score_energy.clamp(min=TINY)):
            total = (score_energy * emphasis).sum().clamp(min=TINY)
            score = score_lost * emphasis / total
            losses.append(value_lost + (score + score.mT))
        return losses

    def _measure_pair(self, pair: Tensor, roots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is lost if both heads in ``pair [2]`` share one: the score errors of their
        queries ``[2]``, their score energies ``[2]``, and the error of their values. ``roots [G, D,
        D]`` are the square roots of the heads' metrics.
        """
        group = self.head_moments.select_heads(pair)
        losses = compute_score_errors_and_energies(
            fit_scores(share_keys(group), group, PAIR_ROUNDS), group
        )
        errors, energies = (torch.unflatten(part, 0, (2, -1)).sum(1) for part in losses)
        # Two heads lose the principal components of both together beyond the first D.
        components = torch.linalg.eigvalsh(apply_metric_root(group.values, roots[pair]))
        return errors, energies, components[: len(components) // 2].clamp(min=0).sum()


def group_neighbors(kv_heads: int, groups: int) -> Partition:
    """Return a partition of ``kv_heads`` heads into ``groups`` groups of neighboring heads;
    ``groups`` divides ``kv_heads``.
    """
    size = kv_heads // groups
    return tuple(tuple(range(start, start + size)) for start in range(0, kv_heads, size))


def propose_partitions(pairs: PairLosses, groups: int) -> list[Partition]:
    """Return a few distinct partitions of the heads that are worth evaluating: groups of neighbors,
    then the best by each estimate of the pairs' losses.
    """
    kv_heads = pairs.layer_moments.weights.kv_heads
    partitions = [group_neighbors(kv_heads, groups)]
    if groups in (1, kv_heads):
        return partitions
    # Each estimate is best for some layers, so the judge evaluates one candidate from each.
    for loss in pairs.loss_estimates:
        partition = _search_partition(loss, groups)
        if partition not in partitions:
            partitions.append(partition)
    return partitions


def _search_partition(loss: Tensor, groups: int) -> Partition:
    """Return a partition into ``groups`` groups with a small sum of pair losses ``loss [G, G]``:
    built greedily, then improved by swapping heads.
    """
    table: list[list[float]] = loss.tolist()
    free = set(range(len(table)))
    size = len(table) // groups
    partition: list[list[int]] = []

    def sum_pair_losses(head: int, group: list[int]) -> float:
        """Return the sum of pair losses between ``head`` and the other heads of ``group``."""
        return sum(table[head][other] for other in group if other != head)

    while free:
        pairs = itertools.combinations(sorted(free), 2)
        first, second = min(pairs, key=lambda pair: table[pair[0]][pair[1]])
        group = [first, second]
        while len(group) < size:
            rest = sorted(free - set(group))
            group.append(min(rest, key=lambda head: sum_pair_losses(head, group)))
        partition.append(group)
        free -= set(group)

    improved = True
    while improved:
        improved = False
        for one, two in itertools.combinations(partition, 2):
            for a, b in itertools.product(range(size), repeat=2):
                x = one[a]
                y = two[b]
                before = sum_pair_losses(x, one) + sum_pair_losses(y, two)
                after = (
                    sum_pair_losses(x, two) - table[x][y] + sum_pair_losses(y, one) - table[x][y]
                )
                if after < before * (1 - 1e-9):
                    one[a] = y
                    two[b] = x
                    improved = True
    # one spelling for equal partitions
    return tuple(sorted(tuple(sorted(group)) for group in partition))
