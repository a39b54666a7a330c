"""A latent whose channels are mixed: nothing changes, but for what a quantized cache loses."""

import pytest
import torch
from helpers.checkpoints import convert, stock_model

from kvfold.convert.data import demo_folder
from kvfold.convert.transforms.latent.variants import make_hartley_matrix

SPLIT = {"to": "mla", "kv_rank": 16, "rope_dim": 8, "method": "svd"}


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_the_matrix_is_orthogonal_and_spreads_every_channel(size):
    mix = make_hartley_matrix(size)
    torch.testing.assert_close(
        mix @ mix.mT, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-13
    )
    assert mix.abs().max() <= (2 / size) ** 0.5 + 1e-12


def latents(model, tokens, rounded=None):
    """The logits, and what an engine would cache of each layer's latent; with it ``rounded`` where
    given.
    """
    seen = []

    def note(module, args, latent):
        seen.append(latent)
        return latent if rounded is None else rounded(latent)

    hooks = [
        layer.self_attn.kv_a_layernorm.register_forward_hook(note) for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(tokens).logits
    for hook in hooks:
        hook.remove()
    return logits, seen


def both(source, folder, **options):
    """The stock models of a conversion without and with the option."""
    for rotate in (False, True):
        split = {**SPLIT, **options, "rotate_latent": rotate}
        yield stock_model(convert(source, folder / str(rotate), **split)).float()


def test_rotation_changes_no_logits_and_keeps_the_constant_out_of_the_cache(tiny_family, tmp_path):
    plain, mixed = both(tiny_family("qwen2", use_sliding_window=False), tmp_path)
    tokens = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    (expected, before), (found, after) = latents(plain, tokens), latents(mixed, tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    for latent, other in zip(after, before, strict=True):
        assert other[..., -1].abs().min() > 100
        assert not latent[..., -1].any()
        assert not torch.allclose(latent[..., :-1], other[..., :-1], atol=1e-2)


def int8(latent):
    step = latent.abs().amax(-1, keepdim=True) / 127
    return (latent / step).round() * step


def test_a_quantized_cache_loses_less(tmp_path):
    """Of a trained model. One scale per token cannot serve a constant of a thousand and a latent
    below one.
    """
    plain, mixed = both(demo_folder(), tmp_path, kv_rank=48, rope_dim=16)
    tokens = torch.randint(3, 2000, (4, 64), generator=torch.Generator().manual_seed(0))
    exact, _ = latents(plain, tokens)
    before, after = (
        float((latents(model, tokens, int8)[0] - exact).std()) for model in (plain, mixed)
    )
    assert after < before / 20
