"""The student of polishing is the stock model: what a reader of the checkpoint will load."""

import pytest
import torch
from helpers.checkpoints import stock_model
from helpers.students import TOKENS, student


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "mixtral", "gemma2", "gemma3_text", "phi3", "granite", "cohere", "olmo2", "qwen3"]
)
def test_its_logits_and_gradients_are_those_of_the_stock_model(tiny_family, family):
    folder = tiny_family(family)
    ours, stock = student(folder), stock_model(folder)
    logits = ours.logits(ours.hidden(TOKENS))
    expected = stock(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in stock.named_parameters()}
    for name, part in ours.trained.items():
        torch.testing.assert_close(part.master.grad, gradients[part.target], atol=1e-4, rtol=1e-3, msg=name)


def test_masters_are_used_rounded_to_the_dtype_that_they_are_stored_in(tiny_family):
    folder = tiny_family("llama")
    ours, wide = student(folder, torch.bfloat16), student(folder, torch.float32)
    stored = {name: tensor.float() for name, tensor in ours.rounded().items()}
    moved = {name: tensor * (1 + 2**-12) for name, tensor in stored.items()}  # less than half a step of bfloat16
    before, after = [], []
    for each in (ours, wide):
        each.put(stored)
        before.append(each.hidden(TOKENS).detach())
        each.put(moved)
        after.append(each.hidden(TOKENS).detach())
    torch.testing.assert_close(after[0], before[0], atol=1e-6, rtol=0)
    assert (after[1] - before[1]).abs().max() > 1e-5
