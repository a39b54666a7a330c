"""Decoding over latents: ``latent_decode`` against float64, and the calls of ``latent_attention``
that reach it.

Without a CUDA device ``kernel_takes`` is replaced by its conditions on shapes; the kernel itself,
reached the same way, runs interpreted in test_decode_kernel.py and on a device in tests/gpu.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import precision
from helpers.attention import Case, assert_precise, decode_naively, exact_latent, naive_latent

from kvfold.attention import blocked, latent, latent_attention
from kvfold.attention.latent import latent_decode


def problem(dtype, slots=40, queries=1):
    torch.manual_seed(1)
    shapes = [(3, 4, queries, 48), (3, 4, queries, 16), (3, slots, 48), (3, slots, 16)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("budget", [1, 3000])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_the_naive_formula(dtype, masked, budget, monkeypatch):
    monkeypatch.setattr(blocked, "_CPU_SCORES", budget)
    inputs = problem(dtype, 300, queries=2)
    mask = None
    if masked:
        mask = torch.rand(3, 1, 2, 300) < 0.6
        mask[..., -1] = True
    expected = decode_naively(*(x.double() for x in inputs), 0.2, mask)
    naive = (decode_naively(*inputs, 0.2, mask) - expected).abs().max()
    result = latent_decode(*inputs, 0.2, mask)
    assert result.dtype == dtype
    assert (result - expected).abs().max() <= max(2 * naive, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("boolean", [False, True])
def test_masks_of_each_head_and_strided_caches(boolean):
    query, rope, c, key = inputs = problem(torch.float32)
    mask = torch.randn(3, 4, 1, 40)
    if boolean:
        mask = mask > 0
    cache = torch.cat([c, key], -1)
    result = latent_decode(query, rope, cache[..., :48], cache[..., 48:], 0.2, mask)
    expected = decode_naively(*(x.double() for x in inputs), 0.2, mask)
    torch.testing.assert_close(result, expected.float(), **precision.ACTIVATIONS)


def test_the_traced_operator_computes_the_same():
    inputs = problem(torch.float32)
    compiled = torch.compile(latent_decode, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs, 0.2), latent_decode(*inputs, 0.2))


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

    kernel = SimpleNamespace(decode_latent=decode_latent)
    monkeypatch.setitem(sys.modules, "kvfold.attention.kernel", kernel)
    monkeypatch.setattr(latent, "kernel_takes", lambda query, rope, mask: query.shape[2] == 1)
    return calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(starts=torch.tensor([0, 7])),
        Case(lengths=torch.tensor([40, 33]), offset=torch.tensor([39, 20])),
    ],
    ids=["whole", "starts", "lengths and offset"],
)
@torch.no_grad()
def test_a_decoding_step_is_the_formula(masks, case, dtype):
    inputs = decoding_step(dtype)
    result = latent_attention(*inputs, absorbed=True, **case.options)
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


@pytest.mark.skipif(not latent._HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize(("capability", "supported"), [((7, 5), False), ((8, 0), True)])
def test_cards_that_triton_does_not_support_take_blocks(capability, supported, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query = SimpleNamespace(dtype=torch.float16, device=torch.device("cuda"), shape=(1, 4, 1, 16))
    assert latent.kernel_takes(query, query, None) is supported


def test_the_kernel_takes_fewer_slots_at_once_where_shared_memory_is_less():
    kernel = pytest.importorskip("kvfold.attention.kernel", exc_type=ImportError)
    hopper = kernel.choose_tile(64, 512, 64, 2, 232448)
    ampere = kernel.choose_tile(64, 512, 64, 2, 166912)
    assert ampere.slots < hopper.slots
