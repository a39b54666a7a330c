"""Caches: exact bytes, and growth."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.attention import KVCache, LatentCache, cache_bytes, cache_numbers

SIZES = {"heads": 8, "kv_heads": 2, "head_dim": 16, "kv_rank": 24, "rope_dim": 4}


@pytest.mark.parametrize(
    ("variant", "numbers"), [("mha", 256), ("gqa", 64), ("mqa", 32), ("mla", 28)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_the_formula_are_bytes_of_the_cache(variant, numbers, dtype):
    layers = 3
    context = 10
    batch = 2
    heads = {"mha": 8, "gqa": 2, "mqa": 1}.get(variant)
    caches = [
        (
            LatentCache(batch, 24, 4, context, dtype=dtype)
            if heads is None
            else KVCache(batch, heads, 16, context, dtype=dtype)
        )
        for _ in range(layers)
    ]
    for cache in caches:
        new = [
            torch.zeros(*buffer.shape[:-2], context, buffer.shape[-1], dtype=dtype)
            for buffer in cache.buffers
        ]
        cache.append(*new)
    expected = cache_bytes(variant, layers, context, dtype, batch=batch, **SIZES)
    assert cache_numbers(variant, **SIZES) == numbers
    assert expected == layers * context * batch * numbers * dtype.itemsize
    assert sum(cache.nbytes for cache in caches) == expected
    assert sum(buffer.nbytes for cache in caches for buffer in cache.buffers) == expected
    # values may be narrower than keys
    cache = KVCache(1, 2, 16, value_dim=8)
    cache.append(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 8))
    assert cache.nbytes == cache_bytes(
        "gqa", 1, 3, torch.float32, kv_heads=2, head_dim=16, value_dim=8
    )


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
