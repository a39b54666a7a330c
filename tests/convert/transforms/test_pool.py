"""The pooling baselines on canonical weights."""

from dataclasses import replace

import pytest
import torch

from kvfold.convert.transforms.fold import pool
from kvfold.convert.transforms.weights import AttentionWeights, HeadNorm

H, G, D, E = 12, 6, 4, 10


def weights(dtype: torch.dtype = torch.float32, norm: HeadNorm | None = None) -> AttentionWeights:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return AttentionWeights(
        q=draw(H, D, E),
        k=draw(G, D, E),
        v=draw(G, D, E),
        o=draw(E, H, D),
        q_bias=draw(H, D),
        k_bias=draw(G, D),
        v_bias=draw(G, D),
        o_bias=draw(E),
        q_norm=None if norm is None else replace(norm, weight=draw(H, D), bias=None),
        k_norm=norm,
    )


def norm(**changes) -> HeadNorm:
    generator = torch.Generator().manual_seed(2)
    rows, bias = (torch.randn((G, D), generator=generator) for _ in range(2))
    return HeadNorm(kind="layer", **{"weight": rows, "bias": bias, **changes})


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_mean_averages_runs_of_neighboring_heads(groups):
    source = weights(norm=norm())
    result, size = pool.mean(source, groups), G // groups
    for part in ("k", "v", "k_bias", "v_bias"):
        for group in range(groups):
            members = getattr(source, part)[group * size : (group + 1) * size]
            torch.testing.assert_close(getattr(result, part)[group], members.mean(0))
    torch.testing.assert_close(result.k_norm.weight[0], source.k_norm.weight[:size].mean(0))
    torch.testing.assert_close(result.k_norm.bias[0], source.k_norm.bias[:size].mean(0))
    for part in ("q", "o", "q_bias", "o_bias", "q_norm"):
        assert getattr(result, part) is getattr(source, part)


def test_mean_of_low_precision_is_taken_in_float32():
    source = weights(torch.bfloat16)
    result = pool.mean(source, 1)
    assert result.k.dtype == result.v_bias.dtype == torch.float32
    torch.testing.assert_close(result.k[0].double(), source.k.double().mean(0), rtol=1e-6, atol=1e-7)
    assert pool.mean(weights(torch.float64), 1).k.dtype == torch.float64


def test_first_takes_the_first_head_of_each_group():
    source = weights(torch.bfloat16, norm())
    result = pool.first(source, 2)
    assert torch.equal(result.k, source.k[[0, 3]])
    assert torch.equal(result.v_bias, source.v_bias[[0, 3]])
    assert torch.equal(result.k_norm.weight, source.k_norm.weight[[0, 3]])
    assert result.k.data_ptr() != source.k.data_ptr(), "a view would keep every head in memory"


@pytest.mark.parametrize("method", [pool.mean, pool.first])
def test_as_many_groups_as_heads_changes_no_bit(method):
    source = weights(norm=norm())
    result = method(source, G)
    assert torch.equal(result.k, source.k)
    assert torch.equal(result.v, source.v)
    assert torch.equal(result.k_norm.weight, source.k_norm.weight)


def test_a_shared_norm_keeps_its_bits():
    row = torch.randn(D)
    source = weights(norm=norm(weight=row.repeat(G, 1), bias=None, shared=True))
    for result in (pool.mean(source, 3), pool.first(source, 3), pool.random(source, 3, std=0.02, seed=0, layer=0)):
        assert result.k_norm.shared
        assert torch.equal(result.k_norm.weight, row.repeat(3, 1))


def test_random_is_fresh_deterministic_and_of_the_requested_spread():
    source = weights(norm=norm(offset=1.0))
    result = pool.random(source, 3, std=0.5, seed=4, layer=1)
    again = pool.random(source, 3, std=0.5, seed=4, layer=1)
    assert torch.equal(result.k, again.k)
    assert torch.equal(result.v, again.v)
    for seed, layer in ((4, 2), (5, 1)):
        assert not torch.equal(result.k, pool.random(source, 3, std=0.5, seed=seed, layer=layer).k)
    assert not torch.equal(result.k, result.v)
    assert not result.k_bias.any()
    assert not result.v_bias.any()
    assert torch.equal(result.k_norm.weight + 1.0, torch.ones(3, D))
    assert not result.k_norm.bias.any()
    big = AttentionWeights(*(torch.zeros(shape) for shape in ((H, 64, 512), (G, 64, 512), (G, 64, 512), (512, H, 64))))
    drawn = pool.random(big, 6, std=0.02, seed=0, layer=0).k
    assert drawn.std().item() == pytest.approx(0.02, rel=0.01)  # 196608 draws: one standard error is 0.16 %
    assert abs(drawn.mean().item()) < 2e-4


@pytest.mark.parametrize("groups", [0, 4, 12, -1])
def test_groups_must_divide_the_heads(groups):
    message = f"kv_heads: {groups} must divide the 6 key/value heads"
    for method in (pool.mean, pool.first):
        with pytest.raises(ValueError, match=message):
            method(weights(), groups)
    with pytest.raises(ValueError, match=message):
        pool.random(weights(), groups, std=0.02, seed=0, layer=0)
