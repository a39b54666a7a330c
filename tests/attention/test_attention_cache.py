"""Caches: exact bytes, and growth."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.attention import KVCache, LatentCache, cache_bytes, cache_numbers

SIZES = {"heads": 8, "kv_heads": 2, "head_dim": 16, "kv_rank": 24, "rope_dim": 4}


@pytest.mark.parametrize(
    ("variant", "kv_heads", "numbers"),
    [("mha", 8, 256), ("gqa", 2, 64), ("mqa", 1, 32), ("mla", None, 28)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_the_formula_are_bytes_of_the_cache(variant, kv_heads, numbers, dtype):
    if variant == "mla":
        cache = LatentCache(2, 24, 4, 10, dtype=dtype)
    else:
        cache = KVCache(2, kv_heads, 16, 10, dtype=dtype)
    cache.append(*(torch.zeros(buffer.shape, dtype=dtype) for buffer in cache.buffers))
    expected = 2 * 10 * numbers * dtype.itemsize
    assert cache_numbers(variant, **SIZES) == numbers
    assert cache_bytes(variant, 3, 10, dtype, batch=2, **SIZES) == 3 * expected
    assert cache.nbytes == sum(buffer.nbytes for buffer in cache.buffers) == expected


def test_values_may_be_narrower_than_keys():
    cache = KVCache(1, 2, 16, value_dim=8)
    cache.append(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 8))
    sizes = {"kv_heads": 2, "head_dim": 16, "value_dim": 8}
    assert cache.nbytes == cache_bytes("gqa", 1, 3, torch.float32, **sizes)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 6))
def test_growing_keeps_every_token(pieces, capacity):
    cache = LatentCache(2, 3, 1, capacity)
    total = 0
    tokens = torch.arange(2 * sum(pieces) * 4.0).view(2, -1, 4)
    for piece in pieces:
        held = cache.append(tokens[:, total : total + piece])
        total += piece
        assert torch.equal(held, tokens[:, :total])
        assert cache.length == total
        assert cache.nbytes == 2 * total * 4 * 4
    assert cache.capacity <= max(capacity, 1.5 * total + 1)
