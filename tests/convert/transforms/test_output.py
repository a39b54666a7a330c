"""The output projection in closed form."""

import torch
from helpers.layers import normal

from kvfold.convert.transforms import linalg
from kvfold.convert.transforms.linalg import fit_output_projection


def test_it_minimizes_the_damped_objective():
    heads = normal(1, 200, 12)
    target = normal(2, 200, 5)
    present = normal(3, 5, 12)
    gram = heads.mT @ heads / 200
    found = fit_output_projection(
        present, gram, (target - heads @ present.mT).mT @ heads / 200
    ).requires_grad_()
    damping = linalg.OUTPUT_RIDGE * gram.diagonal().mean()
    loss = (target - heads @ found.mT).square().sum() / 200 + damping * (
        found - present
    ).square().sum()
    (gradient,) = torch.autograd.grad(loss, found)
    assert gradient.abs().max() < 1e-12
