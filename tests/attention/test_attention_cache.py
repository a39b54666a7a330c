"""Caches: exact bytes, and growth; and the package's README, whose code runs."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfold.attention
from kvfold.attention import KVCache, LatentCache

README = (Path(kvfold.attention.__file__).parent / "README.md").read_text()


@pytest.mark.parametrize(
    ("variant", "cache"),
    [
        ("MHA", KVCache(2, 32, 128, 10, dtype=torch.bfloat16)),
        ("GQA", KVCache(2, 8, 128, 10, dtype=torch.bfloat16)),
        ("MQA", KVCache(2, 1, 128, dtype=torch.bfloat16)),
        ("MLA", LatentCache(2, 512, 64, dtype=torch.bfloat16)),
    ],
)
def test_bytes_of_the_cache_are_those_of_the_table_in_the_readme(variant, cache):
    numbers = int(re.search(rf"^\| {variant} \| `[^`]*` \| (\d+)", README, re.MULTILINE)[1])
    tokens = [buffer.new_zeros(*buffer.shape[:-2], 7, buffer.shape[-1]) for buffer in cache.buffers]
    cache.append(*tokens)
    assert cache.nbytes == 2 * 7 * numbers * torch.bfloat16.itemsize


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 6))
def test_growing_keeps_every_token(pieces, capacity):
    cache = LatentCache(2, 3, 1, capacity)
    tokens = torch.arange(2 * sum(pieces) * 4.0).view(2, -1, 4)
    for piece in tokens.split(pieces, 1):
        cached = cache.append(piece)
        assert torch.equal(cached, tokens[:, : cache.length])
        assert cache.nbytes == cached.nbytes
    assert cache.length == sum(pieces)
    assert cache.capacity <= max(capacity, 1.5 * cache.length + 1)


def test_code_of_the_readme_runs():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["z"].shape == (2, 32, 10, 128)
    assert names["step"].shape == (2, 32, 1, 128)
