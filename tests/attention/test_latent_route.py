"""``latent_attention(absorbed=True)``: which calls reach ``latent_decode``, and that their numbers stay the formula's.

Without a CUDA device ``kernel_takes`` is replaced by its conditions on shapes; the kernel itself, reached the same way,
runs interpreted in test_decode_kernel.py and on a device in tests/gpu.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import precision
from helpers.attention import Case, assert_precise, exact_latent, naive_latent, small_modules

from kvfold.attention import latent, latent_attention

B, H, S, DN, P, R, DV = 2, 4, 40, 8, 6, 16, 12
RAGGED = {
    "starts": torch.tensor([0, 7]),
    "lengths": torch.tensor([40, 33]),
    "offset": torch.tensor([39, 20]),
}


def problem(dtype=torch.float32, queries=1):
    torch.manual_seed(2)
    shapes = [(B, H, queries, DN), (B, H, queries, P), (B, S, R + P), (H, DN, R), (H, DV, R)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.fixture
def calls(monkeypatch):
    """The masks that the kernel was called with, where one query at a time is said to be its own."""
    seen = []

    def decode_latent(query, query_rope, c, key_rope, scale, *, mask):
        seen.append(mask)
        wide = torch.promote_types(c.dtype, torch.float32)
        keys = torch.cat([c, key_rope], -1)[:, None].to(wide)
        scores = scale * torch.cat([query, query_rope], -1).to(wide) @ keys.mT
        scores = scores if mask is None else scores.masked_fill(~mask[:, None, None], -torch.inf)
        return (scores.softmax(-1) @ c[:, None].to(wide)).to(c.dtype)

    monkeypatch.setitem(sys.modules, "kvfold.attention.kernel", SimpleNamespace(decode_latent=decode_latent))
    monkeypatch.setattr(latent, "kernel_takes", lambda query, query_rope, mask: query.shape[2] == 1)
    return seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", [(), ("starts",), ("lengths",), ("offset",), tuple(RAGGED)], ids=" ".join)
def test_a_decoding_step_is_the_formula(calls, names, dtype):
    case, inputs = Case(**{name: RAGGED[name] for name in names}), problem(dtype)
    with torch.no_grad():
        latent_attention(*inputs, absorbed=False, **case.options)
        assert calls == []
        result = latent_attention(*inputs, absorbed=True, **case.options)
    assert [mask is None for mask in calls] == [not names]
    assert_precise(result, naive_latent(*inputs, case, True), exact_latent(*inputs, case))


@pytest.mark.parametrize(("queries", "options"), [(2, {}), (1, {"window": 5})], ids=["several queries", "window"])
def test_other_calls_take_blocks(calls, queries, options):
    latent_attention(*problem(queries=queries), absorbed=True, **options)
    assert calls == []


def test_gradients_take_blocks(calls):
    inputs = [x.requires_grad_() for x in problem()]
    grads = [torch.autograd.grad(latent_attention(*inputs, absorbed=form).sum(), inputs) for form in (True, False)]
    assert calls == []
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        latent_attention(*inputs, absorbed=True)
    assert len(calls) == 1


def test_modules_decode_that_way_and_compile_whole(calls):
    torch.manual_seed(0)
    module, x = small_modules()["mla"], torch.randn(2, 6, 64)
    with torch.no_grad():
        expected = module(x)
        for step in (module, torch.compile(module, fullgraph=True, backend="eager")):
            cache = module.new_cache(2, 6, growing=False)
            parts = [step(token, cache=cache) for token in x.split(1, 1)]
            torch.testing.assert_close(torch.cat(parts, 1), expected, **precision.ACTIVATIONS)
            assert len(calls) >= 6
            calls.clear()
    torch._dynamo.reset()


def test_on_a_cpu_blocks_are_taken(monkeypatch):
    monkeypatch.setattr(latent, "latent_decode", None)
    with torch.no_grad():
        latent_attention(*problem(torch.bfloat16), absorbed=True)
