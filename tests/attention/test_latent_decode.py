"""Decoding over latents: ``attend_to_latents`` against float64, and the calls of
``latent_attention`` that reach it.

Without a CUDA device ``kernel_supports`` is replaced by its conditions on shapes; the kernel
itself,
reached the same way, runs interpreted in test_decode_kernel.py and on a device in tests/gpu.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.attention import Case, assert_precise, decode_naively, exact_latent, naive_latent

from kvfold.attention import blocked, latent, latent_attention
from kvfold.attention.latent import attend_to_latents


def problem(dtype, slots=40, queries=1):
    torch.manual_seed(1)
    shapes = [(3, 4, queries, 48), (3, 4, queries, 16), (3, slots, 48), (3, slots, 16)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


MASKS = {
    "none": None,
    "of keys": torch.rand(3, 1, 2, 300) < 0.6,
    "of each head": torch.rand(3, 4, 2, 300) < 0.6,
    "bias": torch.randn(3, 4, 2, 300),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_the_naive_formula(dtype, mask, monkeypatch):
    monkeypatch.setattr(blocked, "_CPU_SCORES", 3000)
    query, rope, c, key = problem(dtype, 300, queries=2)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    cache = torch.cat([c, key], -1)
    exact = decode_naively(query.double(), rope.double(), c.double(), key.double(), 0.2, mask)
    naive = decode_naively(query, rope, c, key, 0.2, mask)
    result = attend_to_latents(query, rope, cache[..., :48], cache[..., 48:], 0.2, mask)
    assert_precise(result, naive, exact)


def test_the_traced_operator_computes_the_same():
    inputs = problem(torch.float32)
    compiled = torch.compile(attend_to_latents, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs, 0.2), attend_to_latents(*inputs, 0.2))


def decoding_step(dtype=torch.float32, queries=1):
    torch.manual_seed(2)
    shapes = [(2, 4, queries, 8), (2, 4, queries, 6), (2, 40, 22), (4, 8, 16), (4, 12, 16)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.fixture
def masks(monkeypatch):
    """The masks of the kernel's calls; it is said to take calls with one query."""
    calls = []

    def decode_latent(query, rope, c, key, scale, mask):
        calls.append(mask)
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, rope, c, key)]
        mask = None if mask is None else mask[:, None, None]
        return decode_naively(*wide, scale, mask).to(c.dtype)

    kernel = SimpleNamespace(run_latent_kernel=decode_latent)
    monkeypatch.setitem(sys.modules, "kvfold.attention.kernel", kernel)
    monkeypatch.setattr(latent, "kernel_supports", lambda query, rope, mask: query.shape[2] == 1)
    return calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [Case(), Case(starts=torch.tensor([0, 7])), Case(offset=20)],
)
@torch.no_grad()
def test_a_decoding_step_is_the_formula(masks, case, dtype):
    inputs = decoding_step(dtype)
    result = latent_attention(*inputs, absorbed=True, **vars(case))
    assert [mask is None for mask in masks] == [case == Case()]
    assert_precise(result, naive_latent(*inputs, case, True), exact_latent(*inputs, case))


@torch.no_grad()
def test_other_calls_take_blocks(masks):
    latent_attention(*decoding_step(queries=2), absorbed=True)
    latent_attention(*decoding_step(), absorbed=True, window=5)
    latent_attention(*decoding_step(), absorbed=False)
    with torch.enable_grad():
        latent_attention(*(x.requires_grad_() for x in decoding_step()), absorbed=True)
    assert masks == []
