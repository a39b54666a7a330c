"""The latent decode kernel on a CUDA device: right at the sizes that are served."""

import pytest
import torch

from kvfold.attention import latent_attention
from kvfold.attention.latent import kernel_takes, latent_decode

pytestmark = pytest.mark.gpu


def problem(batch, heads, slots, rank=512, rope=64, dtype=torch.bfloat16):
    torch.manual_seed(0)
    sizes = (
        (batch, heads, 1, rank),
        (batch, heads, 1, rope),
        (batch, slots, rank),
        (batch, slots, rope),
    )
    return [torch.randn(size, device="cuda", dtype=dtype) for size in sizes]


def formula(query, rope, latent, key, scale, mask=None):
    scores = scale * (query @ latent[:, None].mT + rope @ key[:, None].mT)
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return scores.float().softmax(-1).to(latent.dtype) @ latent[:, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "heads", "slots"), [(1, 32, 33000), (16, 32, 2049), (3, 128, 700), (2, 16, 1)]
)
def test_error_is_at_most_twice_that_of_torch(batch, heads, slots, dtype):
    inputs = problem(batch, heads, slots, dtype=dtype)
    scale = 576**-0.5
    # of the second half of the sequences, only the second half of the slots is seen
    late = torch.arange(batch, device="cuda")[:, None] >= (batch + 1) // 2
    padded = (torch.arange(slots, device="cuda") >= slots // 2) | ~late
    for mask in (None, padded[:, None, None]):
        assert kernel_takes(inputs[0], inputs[1], mask)
        exact = formula(*(x.double() for x in inputs), scale, mask)
        naive = formula(*inputs, scale, mask)
        found = latent_decode(*inputs, scale, mask)
        assert (found - exact).abs().max() <= 2 * (naive - exact).abs().max()


@torch.no_grad()
def test_latent_attention_takes_the_kernel(monkeypatch):
    from kvfold.attention import kernel

    calls = []
    plain = kernel.decode_latent
    monkeypatch.setattr(
        kernel, "decode_latent", lambda *some, **more: calls.append(1) or plain(*some, **more)
    )
    sizes = (2, 8, 1, 32), (2, 8, 1, 16), (2, 300, 80), (8, 32, 64), (8, 32, 64)
    inputs = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes]
    starts = torch.tensor([0, 100], device="cuda")
    for options in ({}, {"starts": starts}):
        assert latent_attention(*inputs, absorbed=True, **options).isfinite().all()
    latent_attention(*inputs, absorbed=True, window=100)
    latent_attention(*(x.float() for x in inputs), absorbed=True)
    assert len(calls) == 2
