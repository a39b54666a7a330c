"""Latents of constant length, which a live norm leaves alone."""

from dataclasses import replace

import pytest
import torch
from helpers.layers import normal

from kvfold.convert.transforms.latent.latent_weights import LatentWeights
from kvfold.convert.transforms.latent.variants import (
    adapt_to_norm,
    equalize_lengths,
    fit_norm_coordinates,
)

GAIN = torch.linspace(0.5, 2, 16, dtype=torch.float64)


def random_latent(rank=6):
    shapes = (rank, 16), (2, 16), (2, 4, 16), (2, 2, 16), (2, 4, rank), (2, 4, rank), (16, 2, 4)
    return LatentWeights(
        *(normal(seed, *shape) for seed, shape in enumerate(shapes)), torch.ones(1).double(), 0.5
    )


def normed_inputs(gain, tokens=4000):
    """The outputs of an RMSNorm of weight ``gain``: on an ellipsoid."""
    x = normal(1, tokens, len(gain))
    return x / x.square().mean(-1, keepdim=True).sqrt() * gain


def rms(rows):
    return rows.square().mean(-1).sqrt()


def test_full_rank_latent_of_normed_inputs_has_constant_length():
    """The inverse of the norm's weight gives every token the same length, and it is found."""
    down = normal(2, 16, 16)
    inputs = normed_inputs(GAIN)
    forth, back = equalize_lengths(inputs @ down.T)
    torch.testing.assert_close(forth @ back, torch.eye(16, dtype=torch.float64), atol=1e-9, rtol=0)
    length = rms(normed_inputs(GAIN, 500) @ down.T @ forth.T)
    assert length.mean().item() == pytest.approx(1, rel=1e-3)
    assert length.std() < 1e-3 < rms(inputs @ down.T).std() / rms(inputs @ down.T).mean()


@pytest.mark.parametrize("rank", [16, 24])
def test_a_latent_as_wide_as_its_inputs_is_exact(rank):
    """Whatever the spectrum: 1e-6 of the energy in half of the directions."""
    spectrum = torch.cat([torch.ones(8), torch.full((8,), 1e-3)]).double()
    down = random_latent(rank).down * spectrum
    rows, back = fit_norm_coordinates(down, normed_inputs(GAIN))
    new = normed_inputs(GAIN, 500)
    torch.testing.assert_close(
        rms(new @ rows.T), torch.ones(500, dtype=torch.float64), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(new @ rows.T @ back.T, new @ down.T, atol=1e-9, rtol=0)
    assert rows.diagonal().max() / rows.diagonal().min() < 4.1


def test_new_coordinates_change_nothing_that_is_read():
    latent = random_latent()
    found = adapt_to_norm(latent, normed_inputs(torch.ones(16, dtype=torch.float64), 500))
    for name in ("uk", "uv"):
        torch.testing.assert_close(
            getattr(found, name) @ found.down, getattr(latent, name) @ latent.down
        )


@pytest.mark.parametrize("rank", [6, 16])
@pytest.mark.parametrize("silent", ["weights", "inputs"])
def test_a_latent_that_is_always_zero_stays_so(rank, silent):
    latent = random_latent(rank)
    inputs = normed_inputs(torch.ones(16, dtype=torch.float64), 64)
    latent = replace(latent, down=0 * latent.down) if silent == "weights" else latent
    normed = adapt_to_norm(latent, 0 * inputs if silent == "inputs" else inputs)
    assert all(
        value.isfinite().all() for value in vars(normed).values() if isinstance(value, torch.Tensor)
    )
