"""Modules against the float64 reference: whole layers, with and without caches, gradients, masks of
a batch.
"""

from functools import partial

import pytest
import torch
from helpers import precision, reference
from helpers.attention import grouped_module, latent_module, small_modules
from torch import nn
from torch.testing import assert_close

from kvfold.attention import rotary_frequencies

E = 64
T = 7
MODULES = {name: module.double() for name, module in small_modules().items()}
each_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, T, E, dtype=torch.float64)


@pytest.mark.parametrize(("groups", "layout"), [(4, "half"), (2, "interleaved"), (1, "half")])
def test_grouped_module_equals_reference(groups, layout, x):
    frequencies = rotary_frequencies(8)
    module = grouped_module(groups, frequencies=frequencies, layout=layout).double()
    interleaved = layout == "interleaved"
    rotary = partial(reference.rotate, frequencies=frequencies, interleaved=interleaved)
    expected = [reference.grouped_query_attention(row, module, rotary) for row in x]
    assert_close(module(x), torch.stack(expected), **precision.EXACT)


@pytest.mark.parametrize("query_rank", [None, 8])
@pytest.mark.parametrize("absorbed", [False, True])
def test_latent_module_equals_reference(query_rank, absorbed, x):
    module = latent_module(query_rank).double()
    rotary = partial(reference.rotate, frequencies=rotary_frequencies(8), interleaved=True)
    expected = reference.latent_attention(x[0], module, rotary)
    result = module(x, absorbed=absorbed)
    assert_close(result[0], expected, **precision.EXACT)


def test_latent_attention_trains_under_autocast(x):
    module = latent_module(latent_norm=nn.RMSNorm(32))
    with torch.autocast("cpu", torch.bfloat16):
        module(x.float()).float().sum().backward()
    assert module.up.weight.grad.dtype == torch.float32


@each_module
@torch.no_grad()
def test_cached_equals_uncached_at_every_split_point(module, x):
    expected = module(x)
    for split_point in range(T):
        growing = split_point % 2 == 0
        cache = module.new_cache(2, 0 if growing else T, dtype=torch.float64)
        sizes = [split_point] * (split_point > 0)
        sizes += [T - split_point] if growing else [1] * (T - split_point)
        pieces = [module(piece, cache=cache) for piece in x.split(sizes, 1)]
        assert_close(torch.cat(pieces, 1), expected, **precision.EXACT)


@each_module
@torch.no_grad()
def test_a_padded_batch_equals_each_sequence_alone(module, x):
    starts = torch.tensor([0, 3])
    cache = module.new_cache(2, dtype=torch.float64)
    pieces = [module(piece, cache=cache, starts=starts) for piece in x.split(5, 1)]
    padded = torch.cat(pieces, 1)
    assert_close(padded[0], module(x[:1])[0], **precision.EXACT)
    assert_close(padded[1, 3:], module(x[1:, 3:])[0], **precision.EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mqa window", "mla"])
def test_compiled_modules_compute_the_same(name, x):
    module = MODULES[name]
    expected = module(x)
    result = torch.compile(module, backend="aot_eager")(x)
    assert_close(result, expected, **precision.EXACT)
    weights = list(module.parameters())
    grads = torch.autograd.grad(result.square().sum(), weights)
    expected_grads = torch.autograd.grad(expected.square().sum(), weights)
    assert_close(grads, expected_grads, rtol=0, atol=1e-9)
    step = torch.compile(module, backend="eager")
    with torch.no_grad():
        cache = module.new_cache(2, T, dtype=torch.float64)
        pieces = [step(token, cache=cache) for token in x.split(1, 1)]
    assert_close(torch.cat(pieces, 1), expected, **precision.EXACT)
    torch._dynamo.reset()


def test_frequencies_survive_a_cast_to_low_precision(x):
    module = small_modules()["gqa"].to(torch.bfloat16)
    ones = torch.ones(1, 1, 1, 16).index_fill(3, torch.arange(8, 16), 0.0)
    (rotated,) = module.rotation(torch.tensor([9001]), ones)
    assert torch.equal(rotated[0, 0, 0, :8], (9001 * rotary_frequencies(16)).cos().float())
    assert module(x.bfloat16()).dtype == torch.bfloat16
