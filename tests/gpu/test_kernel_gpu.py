"""The latent decode kernel on a CUDA device: right at the sizes that are served."""

import pytest
import torch
from helpers.attention import decode_naively

from kvfold.attention import latent_attention
from kvfold.attention.latent import attend_to_latents, kernel_supports

pytestmark = pytest.mark.gpu


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "slots"),
    [(1, 32, 33000), (16, 32, 2049), (3, 128, 700), (2, 16, 1)],
)
def test_error_is_at_most_twice_that_of_torch(batch, heads, slots, masked, dtype):
    torch.manual_seed(0)
    shapes = [
        (batch, heads, 1, 512),
        (batch, heads, 1, 64),
        (batch, slots, 512),
        (batch, slots, 64),
    ]
    inputs = [normal(*shape, dtype=dtype) for shape in shapes]
    mask = None
    if masked:
        # of the second half of the sequences, only the second half of the slots is seen
        mask = torch.ones(batch, 1, 1, slots, dtype=torch.bool, device="cuda")
        mask[(batch + 1) // 2 :, ..., : slots // 2] = False
    assert kernel_supports(inputs[0], inputs[1], mask)
    scale = 576**-0.5
    exact = decode_naively(*(x.double() for x in inputs), scale, mask)
    naive = decode_naively(*inputs, scale, mask)
    result = attend_to_latents(*inputs, scale, mask)
    assert (result - exact).abs().max() <= 2 * (naive - exact).abs().max()


@torch.no_grad()
def test_latent_attention_takes_the_kernel(monkeypatch):
    from kvfold.attention import kernel

    calls = []
    decode_latent = kernel.run_latent_kernel

    def count(*args, **options):
        calls.append(options)
        return decode_latent(*args, **options)

    monkeypatch.setattr(kernel, "run_latent_kernel", count)
    shapes = [
        (2, 8, 1, 32),
        (2, 8, 1, 16),
        (2, 300, 80),
        (8, 32, 64),
        (8, 32, 64),
    ]
    inputs = [normal(*shape) for shape in shapes]
    starts = torch.tensor([0, 100], device="cuda")
    assert latent_attention(*inputs, absorbed=True).isfinite().all()
    assert latent_attention(*inputs, absorbed=True, starts=starts).isfinite().all()
    latent_attention(*inputs, absorbed=True, window=100)
    latent_attention(*(x.float() for x in inputs), absorbed=True)
    assert len(calls) == 2
