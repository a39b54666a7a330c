"""Losses against their formulas."""

import torch
from torch.nn.functional import kl_div

from kvfold.convert.training.loss import divergence


def test_divergence_and_its_gradient_are_those_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (3 * torch.randn(5, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    found = divergence(logits, teacher)
    expected = kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum")
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(2 * found, logits)
    (wanted,) = torch.autograd.grad(2 * expected, logits)
    torch.testing.assert_close(gradient, wanted)


def test_divergence_of_16_bit_logits_is_computed_in_float32():
    logits, teacher = torch.tensor([[60.0, 0.25]]).bfloat16(), torch.tensor([[60.0, 0.5]]).bfloat16()
    logits.requires_grad_()
    loss = divergence(logits, teacher)
    assert loss.dtype == torch.float32
    loss.backward()
    assert logits.grad.dtype == torch.bfloat16
    assert divergence(teacher, teacher) == 0
