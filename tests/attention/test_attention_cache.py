"""Caches: exact bytes, and growth."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.attention import (
    KVCache,
    LatentCache,
    cache_bytes,
    cache_numbers,
)

SIZES = {
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 16,
    "kv_rank": 24,
    "rope_dim": 4,
}


@pytest.mark.parametrize(
    ("variant", "cache", "numbers"),
    [
        (
            "mha",
            KVCache(2, 8, 16, 10, dtype=torch.bfloat16),
            256,
        ),
        (
            "gqa",
            KVCache(2, 2, 16, 10, dtype=torch.bfloat16),
            64,
        ),
        (
            "mqa",
            KVCache(2, 1, 16, 10, dtype=torch.bfloat16),
            32,
        ),
        (
            "mla",
            LatentCache(2, 24, 4, 10, dtype=torch.bfloat16),
            28,
        ),
    ],
)
def test_bytes_of_the_formula_are_bytes_of_the_cache(variant, cache, numbers):
    cache.append(*map(torch.zeros_like, cache.buffers))
    assert cache_numbers(variant, **SIZES) == numbers
    assert cache.nbytes == sum(buffer.nbytes for buffer in cache.buffers)
    assert cache.nbytes == cache_bytes(variant, 1, 10, torch.bfloat16, batch=2, **SIZES)


def test_values_may_be_narrower_than_keys():
    cache = KVCache(1, 2, 16, value_dim=8)
    cache.append(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 8))
    sizes = {"kv_heads": 2, "head_dim": 16, "value_dim": 8}
    assert cache.nbytes == cache_bytes("gqa", 1, 3, torch.float32, **sizes)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
    st.integers(0, 6),
)
def test_growing_keeps_every_token(pieces, capacity):
    cache = LatentCache(2, 3, 1, capacity)
    tokens = torch.arange(2 * sum(pieces) * 4.0).view(2, -1, 4)
    for piece in tokens.split(pieces, 1):
        cached = cache.append(piece)
        assert torch.equal(cached, tokens[:, : cache.length])
        assert cache.nbytes == cached.nbytes
    assert cache.length == sum(pieces)
    assert cache.capacity <= max(capacity, 1.5 * cache.length + 1)
