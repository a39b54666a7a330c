"""The choice of heads that share: candidate partitions, and the judge's decision."""

import math

import pytest
import torch
from helpers.layers import normal, plain_rotary

from kvfold.convert.methods.fold import fold_with_best_groups
from kvfold.convert.methods.registry import FoldLayer
from kvfold.convert.transforms.fold import grouping, principal
from kvfold.convert.transforms.fold.heads import SCORES
from kvfold.convert.transforms.fold.principal import compute_layer_moments
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics

E = 48
D = 8
TOKENS = 20
ROTARY = plain_rotary(D)
PAIRS = ((0, 5), (1, 3), (2, 7), (4, 6))


def rows(seed, *shape):
    return normal(seed, *shape) / math.sqrt(shape[-1])


def alike(groups, repeat=1):
    """Random heads; those of a group have the same keys and values, up to a little noise."""
    kv_heads = sum(map(len, groups))
    k = rows(1, kv_heads, D, E)
    v = rows(2, kv_heads, D, E)
    for first, *others in groups:
        k[others], v[others] = k[first] + 0.01 * k[others], v[first] + 0.01 * v[others]
    return AttentionWeights(
        q=rows(0, kv_heads * repeat, D, E), k=k, v=v, o=rows(3, E, kv_heads * repeat, D)
    )


def statistics(heads):
    mix = rows(4, E, E)
    mean = rows(6, E)
    gram = mix @ mix.T + torch.eye(E) / 50 + torch.outer(mean, mean)
    profile = (3 * normal(5, heads, TOKENS)).softmax(1)
    return LayerStatistics(gram, mean, 1000, profile)


def pairs_of(weights, context=0):
    return grouping.PairLosses(
        compute_layer_moments(weights, statistics(weights.heads), ROTARY, context)
    )


@pytest.mark.parametrize("members", [PAIRS, ((0, 3, 5, 6), (1, 2, 4, 7))], ids=["pairs", "fours"])
@pytest.mark.parametrize("repeat", [1, 2])
def test_finds_the_heads_that_are_alike(members, repeat):
    found = grouping.propose_partitions(pairs_of(alike(members, repeat)), len(members))
    assert found[0] == grouping.group_neighbors(8, len(members))
    assert members in found


def test_the_candidate_with_the_least_error_is_taken():
    weights = alike(PAIRS)
    wanted = principal.fold_heads(pairs_of(weights, 100).layer_moments, PAIRS)
    layer = FoldLayer(
        index=0,
        weights=weights,
        rotary=ROTARY,
        context=100,
        statistics=statistics(8),
        measure_error=lambda folded: (folded.k - wanted.k).norm().item(),
        kv_heads=4,
        std=0.0,
        seed=0,
        similar=True,
        objective=SCORES,
        pair_losses_cache={},
    )
    error, groups, folded = fold_with_best_groups(layer, layer.statistics)
    assert (error, groups) == (0.0, PAIRS)
    assert torch.equal(folded.k, wanted.k)
