"""``latent_decode`` on a CPU against float64, at sizes where blocks and dtypes take their own ways."""

import pytest
import torch
from helpers import precision

from kvfold.attention import blocked
from kvfold.attention.latent import latent_decode


def problem(dtype, slots, queries=1, batch=3):
    torch.manual_seed(1)
    sizes = ((batch, 4, queries, 48), (batch, 4, queries, 16), (batch, slots, 48), (batch, slots, 16))
    return [torch.randn(size).to(dtype) for size in sizes]


def formula(inputs, mask):
    """Every step in the dtype of ``inputs``, softmax in float32 at least, as eager attention in transformers."""
    query, rope, latent, key = inputs
    scores = 0.2 * (torch.cat([query, rope], -1) @ torch.cat([latent, key], -1)[:, None].mT)
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
    return weights.to(latent.dtype) @ latent[:, None]


def exact(inputs, mask):
    query, rope, latent, key = (x.double() for x in inputs)
    scores = 0.2 * (query @ latent[:, None].mT + rope @ key[:, None].mT)
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ latent[:, None]


@pytest.mark.parametrize("budget", [1, 3000, 1 << 20])
@pytest.mark.parametrize("slots", [1, 40, 700])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_the_naive_formula(dtype, masked, slots, budget, monkeypatch):
    monkeypatch.setattr(blocked, "_CPU_SCORES", budget)
    inputs = problem(dtype, slots, queries=2)
    mask = torch.rand(3, 1, 2, slots, generator=torch.Generator().manual_seed(4)) < 0.6
    mask[..., -1] = True
    mask = mask if masked else None
    expected = exact(inputs, mask)
    naive = (formula(inputs, mask) - expected).abs().max()
    found = latent_decode(*inputs, 0.2, mask)
    assert found.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    else:
        assert (found - expected).abs().max() <= max(2 * naive, 4 * torch.finfo(dtype).eps)


def test_a_mask_of_numbers_and_one_for_every_head():
    inputs = problem(torch.float32, 30)
    bias = torch.randn(3, 4, 1, 30)
    query, rope, latent, key = inputs
    scores = 0.2 * (query @ latent[:, None].mT + rope @ key[:, None].mT) + bias
    torch.testing.assert_close(latent_decode(*inputs, 0.2, bias), scores.softmax(-1) @ latent[:, None])
    seen = bias > 0
    torch.testing.assert_close(latent_decode(*inputs, 0.2, seen), exact(inputs, seen).float(), **precision.ACTIVATIONS)


def test_strided_caches_are_read_in_place():
    whole = torch.randn(3, 50, 64)
    query, rope, _, _ = problem(torch.float32, 50)
    latent, key = whole[..., :48], whole[..., 48:]
    found = latent_decode(query, rope, latent, key, 0.2)
    torch.testing.assert_close(found, latent_decode(query, rope, latent.contiguous(), key.contiguous(), 0.2))


def test_the_traced_operator_computes_the_same():
    inputs = problem(torch.float32, 40)
    compiled = torch.compile(lambda *some: latent_decode(*some, 0.2), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), latent_decode(*inputs, 0.2))
