"""The size of steps: in proportion to tensors, rows and columns, less for the constant channel."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kvfold.convert.targets.mla.encode import CONSTANT, ConstantSlice
from kvfold.convert.training.steps import (
    measure_channel_scales,
    measure_tensor_rms,
    scale_adam_steps,
)


def outer(rows, columns):
    signs = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, 1.0]])
    return torch.outer(torch.tensor(rows), torch.tensor(columns)) * signs


def products(named, held=None):
    return {
        name: rows * columns
        for name, (rows, columns) in measure_channel_scales(named, held or {}).items()
    }


def test_every_tensor_learns_in_proportion_to_its_size():
    named = {
        "a.weight": nn.Parameter(torch.tensor([[3.0, 4.0, 1000.0], [0.0, 0.0, 0.0]])),
        "a.bias": nn.Parameter(torch.zeros(2)),
        "b.weight": nn.Parameter(torch.zeros(2, 2)),
    }
    held = {"a.weight": ConstantSlice(1, 2, 1 / CONSTANT)}
    sizes = measure_tensor_rms(named, held)
    # Neither zeros, as of padded heads, nor the constant channel count; zeros can learn all the
    # same.
    assert sizes == pytest.approx({"a.weight": 12.5**0.5, "a.bias": 12.5**0.5, "b.weight": 1e-6})
    assert measure_tensor_rms(named, {})["a.weight"] > 500
    optimizer = torch.optim.AdamW([{"params": list(named.values()), "weight_decay": 0.1}], lr=0.01)
    scale_adam_steps(optimizer, named, sizes, held, {})
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([0.01 * size for size in sizes.values()])
    decays = [group["lr"] * group["weight_decay"] for group in optimizer.param_groups]
    assert decays == pytest.approx([0.01 * 0.1] * 3)


def test_elements_move_by_a_share_of_their_size_or_of_the_mean_where_that_is_less():
    """Of a matrix whose rows and columns differ a hundredfold, under Adam, whose own steps are
    alike. Zeros, as of padded heads, do not count.
    """
    inner = outer([0.01, 1.0], [0.1, 1.0, 10.0])
    size = float(inner.square().mean().sqrt())
    before = nn.functional.pad(inner, (0, 3, 1, 2))
    weight = nn.Parameter(before.clone())
    named = {"proj.weight": weight}
    optimizer = torch.optim.Adam([weight], lr=0.01, eps=1e-12)
    scale_adam_steps(
        optimizer, named, measure_tensor_rms(named, {}), {}, measure_channel_scales(named, {})
    )
    for _ in range(3):
        optimizer.zero_grad()
        (weight * torch.arange(1.0, 31).view(5, 6)).sum().backward()
        optimizer.step()
    moved = (weight.detach() - before).abs()
    assert_close(moved, 0.03 * before.abs().clamp_max(size))
    assert (before.abs() > size).any()


def test_a_bias_and_the_reader_of_the_constant_channel_move_as_the_rows_of_their_matrix():
    """The reader is zero where there was no bias to fold in, and must learn all the same."""
    named = {
        "a.weight": outer([0.5, 2.0], [1.0, 1.0, 0.0]),
        "a.bias": torch.zeros(2),
        "norm.weight": torch.ones(3),
    }
    found = products(
        named, {"a.weight": ConstantSlice(1, 2, 1 / CONSTANT), "a.bias": ConstantSlice(0, 1, 0.0)}
    )
    assert found.keys() == {"a.weight", "a.bias"}
    assert float(found["a.bias"][1] / found["a.bias"][0]) == pytest.approx(4)
    assert_close(found["a.weight"], found["a.bias"][:, None].expand(2, 3))
