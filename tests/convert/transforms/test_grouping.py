"""The choice of heads that share: candidate partitions, and the judge's decision."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from helpers.layers import normal, plain_rotary
from torch import Tensor

from kvfold.convert.transforms.fold import grouping, principal
from kvfold.convert.transforms.fold.principal import layer_moments
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics

E, D, TOKENS = 48, 8, 20
ROTARY = plain_rotary(D)


def rows(seed: int, *shape: int) -> Tensor:
    return normal(seed, *shape) / math.sqrt(shape[-1])


def moments_of(*layer: object, context: int = 0) -> grouping.Pairs:
    return grouping.Pairs(layer_moments(*layer, context))


def make(kv_heads: int, repeat: int = 1) -> AttentionWeights:
    heads = kv_heads * repeat
    return AttentionWeights(
        q=rows(0, heads, D, E), k=rows(1, kv_heads, D, E), v=rows(2, kv_heads, D, E), o=rows(3, E, heads, D)
    )


def alike(pairs: list[tuple[int, int]], repeat: int = 1) -> AttentionWeights:
    """Random heads of which the pairs given hold the same keys and values, up to a little noise."""
    weights = make(2 * len(pairs), repeat)
    k, v = weights.k.clone(), weights.v.clone()
    for i, j in pairs:
        k[j], v[j] = k[i] + 0.01 * k[j], v[i] + 0.01 * v[j]
    return replace(weights, k=k, v=v)


def statistics(heads: int) -> LayerStatistics:
    mix = rows(4, E, E)
    profile = torch.rand(heads, TOKENS, generator=torch.Generator().manual_seed(5), dtype=torch.float64) ** 4
    return LayerStatistics(mix @ mix.T + torch.eye(E) / 50, rows(6, E), 1000, profile / profile.sum(1, keepdim=True))


def test_contiguous_keeps_the_order():
    assert grouping.contiguous(8, 4) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grouping.contiguous(6, 1) == (tuple(range(6)),)


@pytest.mark.parametrize("groups", [0, 3, 16, -1])
def test_contiguous_refuses_uneven_groups(groups: int):
    with pytest.raises(ValueError, match=f"groups: {groups} must divide 8 KV heads"):
        grouping.contiguous(8, groups)


@pytest.mark.parametrize("repeat", [1, 2])
def test_finds_the_heads_that_are_alike(repeat: int):
    pairs = [(0, 5), (1, 3), (2, 7), (4, 6)]
    weights = alike(pairs, repeat)
    found = grouping.candidates(moments_of(weights, statistics(8 * repeat), ROTARY), 4)
    assert found[0] == grouping.contiguous(8, 4)
    assert tuple(pairs) in found


def test_finds_groups_of_four():
    weights = make(8)
    members = ((0, 3, 5, 6), (1, 2, 4, 7))
    k, v = weights.k.clone(), weights.v.clone()
    for group in members:
        for head in group:
            k[head], v[head] = k[group[0]] + 0.02 * rows(head, D, E), v[group[0]] + 0.02 * rows(head, D, E)
    assert members in grouping.candidates(moments_of(replace(weights, k=k, v=v), statistics(8), ROTARY), 2)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_candidates_are_few_distinct_partitions(groups: int):
    found = grouping.candidates(moments_of(make(8), statistics(8), ROTARY), groups)
    assert found[0] == grouping.contiguous(8, groups)
    assert len(set(found)) == len(found) <= 4
    for partition in found:
        assert sorted(head for group in partition for head in group) == list(range(8))
        assert {len(group) for group in partition} == {8 // groups}
        assert partition == tuple(sorted(tuple(sorted(group)) for group in partition))


def test_pair_losses_are_symmetric_and_small_for_twins():
    losses = moments_of(alike([(0, 2), (1, 3)]), statistics(4), ROTARY).losses
    for loss in losses:
        assert torch.equal(loss, loss.mT)
        assert torch.equal(loss.diagonal(), torch.zeros(4, dtype=loss.dtype))
        twins = {frozenset(pair): loss[pair].item() for pair in ((0, 2), (1, 3))}
        others = [loss[i, j].item() for i, j in itertools.combinations(range(4), 2) if frozenset((i, j)) not in twins]
        assert max(twins.values()) < 0.01 * min(others)


def test_swaps_end_where_no_swap_helps():
    loss = torch.rand(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = (loss + loss.mT).fill_diagonal_(0)

    def total(partition: grouping.Partition) -> float:
        return sum(loss[i, j].item() for group in partition for i, j in itertools.combinations(group, 2))

    start = grouping.contiguous(8, 2)
    end = grouping._swapped(loss, start)
    assert total(end) < total(start)
    for a, b in itertools.product(*end):
        moved = tuple(tuple({a: b, b: a}.get(head, head) for head in group) for group in end)
        assert total(moved) >= total(end) - 1e-9


def test_similar_is_the_judged_best_of_the_candidates():
    pairs = [(0, 5), (1, 3), (2, 7), (4, 6)]
    weights, measured = alike(pairs), statistics(8)
    wanted = principal.fold(weights, measured, ROTARY, pairs, context=100)
    heads = moments_of(weights, measured, ROTARY, context=100)
    choice = grouping.similar(heads, 4, lambda folded: (folded.k - wanted.k).norm().item())
    assert choice.groups == tuple(pairs)
    assert torch.equal(choice.weights.k, wanted.k)
    assert choice.errors[grouping.contiguous(8, 4)] > 0
