"""Whitened inputs, and truncated decompositions against full ones."""

import pytest
import torch
from helpers.layers import normal

from kvfold.convert.transforms import linalg
from kvfold.convert.transforms.latent.factorization import compute_principal_basis
from kvfold.convert.transforms.linalg import fit_output_projection


@pytest.mark.parametrize("width", [7, linalg._BLOCK + 3])
def test_projections_of_whitened_inputs_give_the_same_outputs(width):
    root = normal(0, width, width).tril()
    rows = normal(1, 2, 3, width + 1)
    mean = torch.nn.functional.pad(normal(2, width), (0, 1), value=1.0)
    z = normal(3, width)
    x = torch.cat([root @ z, torch.zeros(1, dtype=torch.float64)]) + mean
    white = linalg.whiten_inputs(rows, root, mean)
    torch.testing.assert_close(white[..., :-1] @ z + white[..., -1], rows @ x)
    single = linalg.whiten_inputs(rows, root, mean, torch.float32)
    torch.testing.assert_close(single, white, rtol=1e-4, atol=1e-4)


def test_singular_vectors_of_few_dims_are_close_to_those_of_a_full_decomposition():
    size = linalg._FULL + 76
    rank = 48
    left = torch.linalg.qr(normal(0, size, size)).Q
    right = torch.linalg.qr(normal(1, size, size)).Q
    spectrum = 1 / torch.arange(1, size + 1, dtype=torch.float64)
    rows = (left * spectrum) @ right
    assert linalg.choose_product_dtype(rank, size) == torch.float32
    vectors = compute_principal_basis(rows, rank, torch.float32)
    torch.testing.assert_close(vectors @ vectors.mT, torch.eye(rank, dtype=torch.float64))
    lost = (rows - rows @ vectors.mT @ vectors).square().sum() / spectrum[rank:].square().sum()
    assert 1 <= lost < 1.01


@pytest.mark.parametrize("rank", [3, 400])
def test_a_full_decomposition_is_used_where_it_may_be_exact(rank):
    rows = normal(0, 40, 3) @ normal(1, 3, 500)
    vectors = compute_principal_basis(rows, rank, torch.float32)
    assert vectors.shape == (rank, 500)
    assert vectors.any(1).sum() == 3
    torch.testing.assert_close(rows @ vectors.mT @ vectors, rows)
    assert linalg.choose_product_dtype(400, 1500) == torch.float64


def test_it_minimizes_the_damped_objective():
    heads = normal(1, 200, 12)
    target = normal(2, 200, 5)
    present = normal(3, 5, 12)
    gram = heads.mT @ heads / 200
    found = fit_output_projection(present, gram, target.mT @ heads / 200).requires_grad_()
    damping = linalg.OUTPUT_RIDGE * gram.diagonal().mean()
    loss = (target - heads @ found.mT).square().sum() / 200 + damping * (
        found - present
    ).square().sum()
    (gradient,) = torch.autograd.grad(loss, found)
    assert gradient.abs().max() < 1e-12
