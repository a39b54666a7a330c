"""The attention package on a CUDA device, in every dtype, against the float64 reference.

The rule is that of the CPU tests: the error is at most twice that of the naive formula in the same
dtype, on the same device, or for float32 twice four units of it.
"""

import copy

import pytest
import torch
from helpers.attention import (
    Case,
    assert_precise,
    exact,
    exact_latent,
    naive,
    naive_latent,
    small_modules,
)
from torch import Tensor

from kvfold.attention import grouped_attention, latent_attention

B = 2
H = 4
T = 9
S = 40
CASES = {
    "causal": Case(),
    "both ways": Case(causal=False),
    "window": Case(window=5),
    "starts": Case(starts=torch.tensor([0, 7])),
    "offset": Case(offset=20),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)

pytestmark = pytest.mark.gpu


@pytest.fixture(
    params=[torch.bfloat16, torch.float16, torch.float32],
    ids=str,
)
def dtype(request):
    torch.manual_seed(0)
    return request.param


def normal(*shape, dtype):
    return torch.randn(shape).to("cuda", dtype)


def on_device(case):
    return {
        name: value.cuda() if isinstance(value, Tensor) else value
        for name, value in vars(case).items()
    }


@each_case
@pytest.mark.parametrize("queries", [1, T])
@pytest.mark.parametrize("groups", [H, 2, 1])
def test_grouped_attention(dtype, groups, queries, case):
    query = normal(B, H, queries, 64, dtype=dtype)
    key = normal(B, groups, S, 64, dtype=dtype)
    value = normal(B, groups, S, 64, dtype=dtype)
    result = grouped_attention(query, key, value, **on_device(case))
    assert_precise(
        result,
        naive(query, key, value, case),
        exact(query, key, value, case),
    )


@pytest.mark.parametrize("case", [Case(), Case(causal=False), Case(window=5)])
def test_gradients_of_grouped_attention(dtype, case):
    leaves = [normal(B, heads, S, 64, dtype=dtype).requires_grad_() for heads in (H, 2, 2)]
    probe = normal(B, H, S, 64, dtype=dtype)
    grads = torch.autograd.grad(
        grouped_attention(*leaves, **vars(case)),
        leaves,
        probe,
    )
    plain = torch.autograd.grad(naive(*leaves, case), leaves, probe)
    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(naive(*wide, case), wide, probe.cpu().double())
    for triple in zip(grads, plain, expected, strict=True):
        assert_precise(*triple)


@each_case
@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("queries", [1, T])
def test_latent_attention(dtype, absorbed, queries, case):
    shapes = [
        (B, H, queries, 64),
        (B, H, queries, 32),
        (B, S, 128),
        (H, 64, 96),
        (H, 48, 96),
    ]
    inputs = [normal(*shape, dtype=dtype) for shape in shapes]
    inputs[3:] = [weight / 96**0.5 for weight in inputs[3:]]
    result = latent_attention(*inputs, absorbed=absorbed, **on_device(case))
    assert_precise(
        result,
        naive_latent(*inputs, case, absorbed),
        exact_latent(*inputs, case),
    )


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa window", "mla"])
def test_modules_cached_and_compiled_are_as_precise_as_plain(dtype, variant):
    module = small_modules()[variant].to("cuda", dtype)
    x = normal(B, 24, 64, dtype=dtype)
    expected = copy.deepcopy(module).cpu().double()(x.cpu().double()).detach()
    plain = module(x)
    with torch.no_grad():
        cache = module.new_cache(B, 24, dtype=dtype, device="cuda")
        pieces = [module(piece, cache=cache) for piece in x.split([20, 1, 1, 1, 1], 1)]
    assert_precise(torch.cat(pieces, 1), plain, expected)
    compiled = torch.compile(module)(x)
    assert_precise(compiled, plain, expected)
    compiled.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
    torch._dynamo.reset()


def test_peak_memory_at_16k_is_far_below_a_score_matrix():
    query, key, value = (normal(1, 2, 16384, 64, dtype=torch.bfloat16) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for options in (
        {},
        {"window": 1024},
        {"starts": torch.tensor([100], device="cuda")},
    ):
        grouped_attention(query, key, value, **options)
    grouped_attention(query[:, :, 8192:], key, value)
    assert torch.cuda.max_memory_allocated() - before < 16384**2 * 2
