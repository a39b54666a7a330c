"""The attention package on a CUDA device, in every dtype, against the float64 reference.

The rule is that of the CPU tests: the error is at most twice that of the naive formula in the same dtype, on the same
device.
"""

import pytest
import torch
from helpers.attention import Case, assert_precise, exact, exact_latent, naive, naive_latent, small_modules
from torch import Tensor

from kvfold.attention import grouped_attention, latent_attention

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
B, H, G, T, S, D = 2, 4, 2, 9, 40, 64
R, P, DN, DV = 96, 32, 64, 48


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def device() -> str:
    torch.manual_seed(0)
    return "cpu"


COUNTS = {"starts": torch.tensor([0, 7])}, {"lengths": torch.tensor([40, 33])}, {"offset": torch.tensor([31, 20])}
MASKS = [{}, {"causal": False}, {"window": 5}, {"window": 5, "causal": False}, *COUNTS]


def normal(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape).to(device, dtype)


def on(device: str, options: dict) -> dict:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}


@pytest.mark.parametrize("options", MASKS, ids=lambda options: ", ".join(options) or "causal")
@pytest.mark.parametrize("queries", [1, T, S])
@pytest.mark.parametrize("groups", [H, G, 1])
def test_grouped_attention(device, dtype, groups, queries, options):
    if queries == S and isinstance(options.get("offset"), Tensor):
        options = {"offset": torch.zeros(B, dtype=torch.long)}
    query = normal(B, H, queries, D, dtype=dtype, device=device)
    key, value = (normal(B, groups, S, D, dtype=dtype, device=device) for _ in range(2))
    found = grouped_attention(query, key, value, **on(device, options))
    case = Case(**options)
    assert_precise(found, naive(query, key, value, case), exact(query, key, value, case))


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 5}], ids=["causal", "both ways", "window"])
def test_gradients_of_grouped_attention(device, dtype, options):
    shapes = [(B, H, S, D), (B, G, S, D), (B, G, S, D)]
    leaves = [normal(*shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]
    probe = normal(B, H, S, D, dtype=dtype, device=device)
    found = torch.autograd.grad(grouped_attention(*leaves, **options), leaves, probe)
    plain = torch.autograd.grad(naive(*leaves, Case(**options)), leaves, probe)
    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(naive(*wide, Case(**options)), wide, probe.cpu().double())
    for triple in zip(found, plain, expected, strict=True):
        assert_precise(*triple)


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("queries", [1, T])
@pytest.mark.parametrize(
    "options", MASKS[:1] + MASKS[2:3] + MASKS[4:], ids=lambda options: ", ".join(options) or "causal"
)
def test_latent_attention(device, dtype, absorbed, queries, options):
    make = {"dtype": dtype, "device": device}
    nope, rope = normal(B, H, queries, DN, **make), normal(B, H, queries, P, **make)
    latent = normal(B, S, R + P, **make)
    up_key, up_value = (normal(H, width, R, **make) / R**0.5 for width in (DN, DV))
    inputs, case = (nope, rope, latent, up_key, up_value), Case(**options)
    found = latent_attention(*inputs, absorbed=absorbed, **on(device, options))
    assert_precise(found, naive_latent(*inputs, case, absorbed), exact_latent(*inputs, case))


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla"])
@torch.no_grad()
def test_modules_cached_as_precise_as_uncached(device, dtype, variant):
    module = small_modules()[variant]
    expected = module.double()(x := torch.randn(B, 24, 64).double())
    module = module.to(device, dtype)
    x = x.to(device, dtype)
    cache = module.new_cache(B, 24, growing=False, dtype=dtype, device=device)
    parts = [module(x[:, :20], cache=cache), *(module(x[:, t : t + 1], cache=cache) for t in range(20, 24))]
    assert_precise(torch.cat(parts, 1), module(x), expected)
    assert cache.nbytes == cache.allocated_bytes == sum(buffer.nbytes for buffer in cache.buffers)


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla"])
def test_modules_compile_whole(device, dtype, variant):
    module = small_modules()[variant].to(device, dtype)
    x = normal(B, 24, 64, dtype=dtype, device=device)
    wide = small_modules()[variant].double()
    wide.load_state_dict({name: weight.cpu().double() for name, weight in module.state_dict().items()})
    found = torch.compile(module, fullgraph=True)(x)
    assert_precise(found, module(x), wide(x.cpu().double()).detach())
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())
    torch._dynamo.reset()
