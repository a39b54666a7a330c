"""The pooling baselines on canonical weights."""

from dataclasses import replace

import pytest
import torch
from helpers.layers import normal

from kvfold.convert.transforms.fold import pool
from kvfold.convert.transforms.weights import AttentionWeights, HeadNorm

H = 12
G = 6
D = 4
E = 10


def weights(dtype=torch.float32, **norm):
    shapes = {"q": (H, D, E), "k": (G, D, E), "v": (G, D, E), "o": (E, H, D)}
    shapes |= {"q_bias": (H, D), "k_bias": (G, D), "v_bias": (G, D), "o_bias": (E,)}
    drawn = {
        name: normal(seed, *shape).to(dtype) for seed, (name, shape) in enumerate(shapes.items())
    }
    k_norm = HeadNorm(
        "layer", **{"weight": normal(8, G, D).float(), "bias": normal(9, G, D).float(), **norm}
    )
    return AttentionWeights(
        **drawn, q_norm=replace(k_norm, weight=normal(10, H, D), bias=None), k_norm=k_norm
    )


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_mean_averages_runs_of_neighboring_heads(groups):
    source = weights(torch.bfloat16)
    result = pool.average_heads(source, groups)
    for name in ("k", "v", "k_bias", "v_bias"):
        members = getattr(source, name).float().unflatten(0, (groups, -1))
        torch.testing.assert_close(getattr(result, name), members.mean(1))
    for name in ("weight", "bias"):
        members = getattr(source.k_norm, name).unflatten(0, (groups, -1))
        torch.testing.assert_close(getattr(result.k_norm, name), members.mean(1))
    for name in ("q", "o", "q_bias", "o_bias", "q_norm"):
        assert getattr(result, name) is getattr(source, name)


def test_first_takes_the_first_head_of_each_group():
    source = weights(torch.bfloat16)
    result = pool.keep_first_heads(source, 2)
    assert torch.equal(result.k, source.k[[0, 3]])
    assert torch.equal(result.v_bias, source.v_bias[[0, 3]])
    assert torch.equal(result.k_norm.weight, source.k_norm.weight[[0, 3]])
    assert result.k.data_ptr() != source.k.data_ptr(), "a view would keep every head in memory"


def test_a_shared_norm_keeps_its_bits():
    row = torch.randn(D)
    source = weights(weight=row.repeat(G, 1), bias=None, shared=True)
    for result in (pool.average_heads(source, 3), pool.keep_first_heads(source, 3)):
        assert torch.equal(result.k_norm.weight, row.repeat(3, 1))


def test_random_is_fresh_deterministic_and_of_the_requested_spread():
    source = weights(offset=1.0)
    result, again, *others = (
        pool.draw_random_heads(source, 3, std=0.5, seed=seed, layer=layer)
        for seed, layer in ((4, 1), (4, 1), (4, 2), (5, 1))
    )
    assert torch.equal(result.k, again.k)
    assert not any(torch.equal(result.k, other.k) for other in others)
    assert not any(rows.any() for rows in (result.k_bias, result.v_bias, result.k_norm.bias))
    assert torch.equal(result.k_norm.weight + 1.0, torch.ones(3, D))
