"""Distance profiles against whole attention maps in float64."""

import pytest
import torch
from helpers.attention import attention_maps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvfold.attention import blocked
from kvfold.attention.drift.profile import sum_attention_by_distance_and_key

QUICKLY = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def distances(length):
    return torch.arange(length)[:, None] - torch.arange(length)


def visible(length, window):
    seen = distances(length) >= 0
    return seen if window is None else seen & (distances(length) < window)


def sum_by_distance(maps):
    """The profile from whole maps ``[B, H, T, T]``."""
    length = maps.shape[-1]
    sums = torch.zeros(maps.shape[1], length, dtype=maps.dtype)
    sums.index_add_(1, distances(length).abs().flatten(), maps.mean(0).flatten(1))
    return sums / sums.sum(-1, keepdim=True)


def heads(seed=0, batch=2, groups=2, share=2, length=150, dim=16):
    torch.manual_seed(seed)
    query = 2 * torch.randn(batch, groups * share, length, dim, dtype=torch.float64)
    return query, torch.randn(batch, groups, length, dim, dtype=torch.float64)


SIZES = st.tuples(
    st.integers(0, 99),  # seed
    st.integers(1, 3),  # sequences
    st.integers(1, 3),  # key heads
    st.integers(1, 3),  # query heads of each
    st.integers(1, 50),  # positions
    st.just(4),
)
WINDOW = st.none() | st.integers(1, 60)
SOFTCAP = st.none() | st.floats(0.5, 50)


@pytest.fixture(params=[1, 500, 1 << 20])
def budget(request, monkeypatch):
    """Scores in memory at once: one row of one head, some, or all."""
    monkeypatch.setattr(blocked, "_CPU_SCORES", request.param)
    monkeypatch.setattr(blocked, "_MOST_ROWS", 8)
    monkeypatch.setattr(blocked, "_FEWEST_ROWS", 3)


@pytest.mark.usefixtures("budget")
@QUICKLY
@given(SIZES, WINDOW, SOFTCAP, st.booleans())
def test_sums_are_those_of_whole_maps(sizes, window, softcap, with_sinks):
    query, key = heads(*sizes)
    sinks = torch.linspace(-2, 3, query.shape[1], dtype=torch.float64) if with_sinks else None
    profile, received = sum_attention_by_distance_and_key(
        query, key, 0.7, window=window, softcap=softcap, sinks=sinks
    )
    seen = visible(query.shape[2], window)
    maps = attention_maps(query, key, 0.7, seen, softcap, sinks)
    assert_close(profile, sum_by_distance(maps), rtol=1e-12, atol=1e-15)
    assert_close(received, maps.mean(1).sum(1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_arithmetic_is_as_exact_as_the_formula_in_float32(dtype):
    query, key = (x.to(dtype) for x in heads(length=300))
    seen = visible(300, None)
    exact = sum_by_distance(attention_maps(query.double(), key.double(), 0.25, seen))
    naive = sum_by_distance(attention_maps(query.float(), key.float(), 0.25, seen))
    error = (sum_attention_by_distance_and_key(query, key, 0.25)[0] - exact).abs().max()
    assert error <= 2 * (naive - exact).abs().max()
