"""Distance profiles and row KL against whole attention maps in float64."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.attention import blocked
from kvfold.attention.drift.profile import attention_sums, distance_profile, row_kl


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
    return torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1).softmax(-1)[
        ..., :-1
    ]


def distances(length: int) -> Tensor:
    return torch.arange(length)[:, None] - torch.arange(length)


def naive_sums(maps: Tensor) -> tuple[Tensor, Tensor]:
    """The two results of ``attention_sums`` from whole maps ``[B, H, T, T]``."""
    length = maps.shape[-1]
    sums = torch.zeros(maps.shape[1], length, dtype=maps.dtype)
    sums.index_add_(1, distances(length).abs().flatten(), maps.mean(0).flatten(1))
    return sums / sums.sum(-1, keepdim=True), maps.mean(1).sum(1)


def heads(
    seed: int, batch: int, heads: int, groups: int, length: int, dim: int
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    query = 2 * torch.randn(batch, heads, length, dim, dtype=torch.float64)
    return query, torch.randn(batch, groups, length, dim, dtype=torch.float64)


@st.composite
def problems(draw) -> dict:
    """The sizes of ``heads`` and the masks of one call."""
    groups = draw(st.integers(1, 3))
    share = draw(st.integers(1, 3))
    sizes = (
        draw(st.integers(0, 99)),
        draw(st.integers(1, 3)),
        groups * share,
        groups,
        draw(st.integers(1, 50)),
        4,
    )
    window = draw(st.one_of(st.none(), st.integers(1, 60)))
    softcap = draw(st.one_of(st.none(), st.floats(0.5, 50)))
    return {
        "sizes": sizes,
        "masks": {"window": window, "causal": draw(st.booleans()), "softcap": softcap},
    }


@pytest.fixture(params=[1, 500, 1 << 20])
def budget(request, monkeypatch):
    """Scores held at once: one row of one head, some, or all."""
    monkeypatch.setattr(blocked, "_CPU_SCORES", request.param)
    monkeypatch.setattr(blocked, "_MOST_ROWS", 8)
    monkeypatch.setattr(blocked, "_FEWEST_ROWS", 3)


QUICKLY = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.usefixtures("budget")
@QUICKLY
@given(problems(), st.booleans())
def test_sums_are_those_of_whole_maps(problem, with_sinks):
    query, key = heads(*problem["sizes"])
    sinks = torch.linspace(-2, 3, query.shape[1], dtype=torch.float64) if with_sinks else None
    found, received = attention_sums(query, key, 0.7, **problem["masks"], sinks=sinks)
    expected = naive_sums(attention_map(query, key, 0.7, **problem["masks"], sinks=sinks))
    torch.testing.assert_close((found, received), expected, rtol=1e-12, atol=1e-15)
    if sinks is None:
        assert torch.equal(distance_profile(query, key, 0.7, **problem["masks"]), found)


@pytest.mark.usefixtures("budget")
@QUICKLY
@given(problems())
def test_row_kl_is_the_mean_divergence_of_rows(problem):
    (seed, batch, count, _, length, _), masks = problem["sizes"], problem["masks"]
    query, key = heads(*problem["sizes"])
    other_query, other_key = heads(seed + 1, batch, count, 1, length, 6)
    found = row_kl(query, key, other_query, other_key, 0.5, 0.3, **masks, other_softcap=4.0)
    other = attention_map(other_query, other_key, 0.3, masks["window"], masks["causal"], 4.0)
    own = attention_map(query, key, 0.5, **masks)
    terms = torch.where(
        own > 0, own * (own.clamp_min(1e-300).log() - other.clamp_min(1e-300).log()), 0
    )
    torch.testing.assert_close(found, terms.sum(-1).mean((0, 2)), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_arithmetic_is_as_exact_as_the_formula_in_float32(dtype):
    query, key = (part.to(dtype) for part in heads(0, 2, 4, 2, 300, 16))
    exact = naive_sums(attention_map(query.double(), key.double(), 0.25))[0]
    plain = (naive_sums(attention_map(query.float(), key.float(), 0.25))[0] - exact).abs().max()
    assert (distance_profile(query, key, 0.25) - exact).abs().max() <= 2 * plain


def test_row_kl_is_zero_for_equal_maps_and_keeps_its_digits_for_nearly_equal_ones_in_float32():
    query, key = (
        20 * part.float() for part in heads(0, 2, 4, 2, 150, 16)
    )  # weights down to e^-80 and beyond
    assert row_kl(query, key, query.clone(), key.clone(), 0.25, 0.25).tolist() == [0.0] * 4
    query, key = heads(0, 1, 2, 1, 100, 8)
    query = query.float().double()
    key = key.float().double()
    other = (query * (1 + 1e-4)).float().double()
    exact = row_kl(query, key, other, key, 0.3, 0.3)
    found = row_kl(query.float(), key.float(), other.float(), key.float(), 0.3, 0.3)
    assert (exact < 1e-7).all()  # below what a sum of p log(p / q) in float32 could tell from zero
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=0)


def test_row_kl_counts_what_only_the_second_map_sees_and_what_is_not_a_number():
    # one key has the whole of p and the other, far below float32's smallest number, the whole of q
    query = torch.tensor([[[[0.0], [1.0]]]])
    key = torch.tensor([[[[0.0], [200.0]]]])
    assert row_kl(query, key, query, -key, 1.0, 1.0).item() == pytest.approx(200 / 2)
    query, key = (part.float() for part in heads(0, 1, 2, 2, 5, 4))
    broken = key.clone()
    broken[0, 1, 2] = math.nan
    assert row_kl(query, key, query, broken, 1.0, 1.0).isnan().tolist() == [False, True]
