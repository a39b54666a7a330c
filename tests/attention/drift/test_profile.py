"""Distance profiles and row KL against whole attention maps in float64."""

import math
import sys

import pytest
import torch
from helpers.processes import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.attention import blocked
from kvfold.attention.drift.profile import attention_sums, distance_profile, row_kl, sum_by_distance

MASKS = st.fixed_dictionaries(
    {
        "window": st.one_of(st.none(), st.integers(1, 60)),
        "causal": st.booleans(),
        "softcap": st.one_of(st.none(), st.floats(0.5, 50)),
    }
)


def attention_map(query, key, scale, window=None, causal=True, softcap=None, sinks=None) -> Tensor:
    """``[B, H, T, T]``: the textbook formula in the dtype of its inputs."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = distances(query.shape[2])
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (distance.abs() >= window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


def distances(length: int) -> Tensor:
    return torch.arange(length)[:, None] - torch.arange(length)


def naive_profile(*args, **kwargs) -> Tensor:
    maps = attention_map(*args, **kwargs).mean(0)  # [H, T, T]
    length = maps.shape[-1]
    sums = torch.zeros(maps.shape[0], length, dtype=maps.dtype)
    return sums.index_add_(1, distances(length).abs().flatten(), maps.flatten(1)) / length


def naive_kl(p: Tensor, q: Tensor) -> Tensor:
    terms = torch.where(p > 0, p * (p.clamp_min(1e-300).log() - q.clamp_min(1e-300).log()), 0)
    return terms.sum(-1).mean((0, 2))


def heads(seed: int, batch: int, heads: int, groups: int, length: int, dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, length, dim, dtype=torch.float64, generator=generator)
    return 2 * query, torch.randn(batch, groups, length, dim, dtype=torch.float64, generator=generator)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 99),
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    length=st.integers(1, 50),
    masks=MASKS,
    block=st.sampled_from([1, 500, 1 << 20]),
)
def test_profile_is_the_mean_weight_at_each_distance(seed, batch, groups, share, length, masks, block):
    query, key = heads(seed, batch, groups * share, groups, length, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "_CPU_SCORES", block)
        patch.setattr(blocked, "_MOST_ROWS", 8)
        patch.setattr(blocked, "_FEWEST_ROWS", 3)
        found, received = attention_sums(query, key, 0.7, **masks)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, naive_profile(query, key, 0.7, **masks), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found.sum(-1), torch.ones(groups * share, dtype=torch.float64), rtol=1e-14, atol=0)
    weights = attention_map(query, key, 0.7, masks["window"], masks["causal"], masks.get("softcap"))
    torch.testing.assert_close(received, weights.mean(1).sum(1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_sinks_take_part_of_every_row(softcap):
    query, key = heads(3, 2, 6, 3, 21, 4)
    sinks = torch.linspace(-2, 3, 6, dtype=torch.float64)
    found, received = attention_sums(query, key, 0.7, window=9, softcap=softcap, sinks=sinks)
    weights = attention_map(query, key, 0.7, 9, True, softcap, sinks)
    assert float(weights.sum(-1).mean()) < 0.9
    torch.testing.assert_close(received, weights.mean(1).sum(1), rtol=1e-12, atol=1e-15)
    sums = torch.zeros(6, 21, dtype=torch.float64)
    sums.index_add_(1, distances(21).abs().flatten(), weights.mean(0).flatten(1))
    torch.testing.assert_close(found, sums / sums.sum(-1, keepdim=True), rtol=1e-12, atol=1e-15)


def test_sums_by_distance_are_those_of_the_diagonals():
    weights = torch.arange(2 * 3 * 4.0).view(2, 3, 4)
    total = torch.ones(2, 20, dtype=torch.float64)
    sum_by_distance(weights, 4, 2, total)  # queries 4 to 6 on keys 2 to 5 of 10
    expected = torch.ones_like(total)
    for row in range(3):
        for column in range(4):
            expected[:, 10 + (2 + column) - (4 + row)] += weights[:, row, column]
    assert torch.equal(total, expected)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 99),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    length=st.integers(1, 50),
    masks=MASKS,
    block=st.sampled_from([1, 500, 1 << 20]),
)
def test_row_kl_is_the_mean_divergence_of_rows(seed, groups, share, length, masks, block):
    query, key = heads(seed, 2, groups * share, groups, length, 4)
    other_query, other_key = heads(seed + 1, 2, groups * share, 1, length, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "_CPU_SCORES", block)
        patch.setattr(blocked, "_MOST_ROWS", 8)
        patch.setattr(blocked, "_FEWEST_ROWS", 3)
        found = row_kl(query, key, other_query, other_key, 0.5, 0.3, **masks, other_softcap=4.0)
    other = attention_map(other_query, other_key, 0.3, masks["window"], masks["causal"], 4.0)
    expected = naive_kl(attention_map(query, key, 0.5, **masks), other)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_arithmetic_is_as_exact_as_the_formula_in_float32(dtype):
    query, key = (part.to(dtype) for part in heads(0, 2, 4, 2, 300, 16))
    exact = naive_profile(query.double(), key.double(), 0.25)
    plain = (naive_profile(query.float(), key.float(), 0.25) - exact).abs().max()
    assert (distance_profile(query, key, 0.25) - exact).abs().max() <= 2 * plain


@pytest.mark.parametrize("sharpness", [1, 20])  # weights down to e^-80 and beyond
def test_row_kl_of_equal_maps_is_exactly_zero(sharpness):
    query, key = (sharpness * part.float() for part in heads(0, 2, 4, 2, 150, 16))
    assert row_kl(query, key, query.clone(), key.clone(), 0.25, 0.25).tolist() == [0.0] * 4


def test_row_kl_of_nearly_equal_maps_keeps_its_digits_in_float32():
    query, key = heads(0, 1, 2, 1, 100, 8)
    query, key = query.float().double(), key.float().double()
    other = (query * (1 + 1e-4)).float().double()
    exact = row_kl(query, key, other, key, 0.3, 0.3)
    found = row_kl(query.float(), key.float(), other.float(), key.float(), 0.3, 0.3)
    assert (exact < 1e-7).all()  # below what a sum of p log(p / q) in float32 could tell from zero
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=0)


def test_row_kl_counts_what_only_the_second_map_sees():
    # one key has the whole of p and the other, far below float32's smallest number, the whole of q
    query = torch.tensor([[[[0.0], [1.0]]]])
    key = torch.tensor([[[[0.0], [200.0]]]])
    found = row_kl(query, key, query, -key, 1.0, 1.0)
    assert found.item() == pytest.approx(200 / 2)


def test_row_kl_does_not_hide_what_is_not_a_number():
    query, key = (part.float() for part in heads(0, 1, 2, 2, 5, 4))
    broken = key.clone()
    broken[0, 1, 2] = math.nan
    found = row_kl(query, key, query, broken, 1.0, 1.0)
    assert found[0] == 0
    assert found[1].isnan()


def test_inputs_that_require_gradients_are_taken():
    query, key = heads(0, 1, 2, 1, 9, 4)
    found = distance_profile(query.requires_grad_(), key.requires_grad_(), 0.5)
    assert not found.requires_grad


MEMORY = """
import resource, torch
from kvfold.attention.drift.profile import distance_profile, row_kl
query, key = torch.randn(1, 32, 8192, 4), torch.randn(1, 8, 8192, 4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
distance_profile(query, key, 0.5, window={window})
row_kl(query, key, query, key, 0.5, 0.5, window={window})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
@pytest.mark.slow
@pytest.mark.parametrize("window", [40, None])
def test_a_context_of_8k_with_32_heads_fits_in_little_memory(window):
    assert (
        int(run_python("-c", MEMORY.format(window=window)).stdout) < 2_000_000
    )  # kilobytes; one whole map of 32 heads would be 8.6 GB
