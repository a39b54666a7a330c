"""Steps in proportion to rows and columns."""

import pytest
import torch
from torch import nn

from kvfold.convert.training.constant import ScaledSlice
from kvfold.convert.training.steps import RelativeSteps, step_scales


def outer(rows: list[float], columns: list[float]) -> torch.Tensor:
    signs = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, 1.0]])
    return torch.outer(torch.tensor(rows), torch.tensor(columns)) * signs


def product(scales: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    rows, columns = scales
    return rows * columns


def test_elements_move_by_a_share_of_their_size_or_of_the_mean_where_that_is_less():
    """Of a matrix whose rows and columns differ a hundredfold, under Adam, whose own steps are alike."""
    weight = nn.Parameter(outer([0.01, 1.0], [0.1, 1.0, 10.0]))
    before, size = weight.detach().clone(), float(weight.detach().square().mean().sqrt())
    optimizer = torch.optim.Adam([weight], lr=0.01 * size, eps=1e-12)
    RelativeSteps([("proj.weight", weight)]).watch(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        (weight * torch.tensor([[3.0, 1.0, 2.0], [1.0, 5.0, 1.0]])).sum().backward()
        optimizer.step()
    moved = (weight.detach() - before).abs()
    torch.testing.assert_close(moved, 0.03 * before.abs().clamp_max(size))
    assert (before.abs() > size).any()


def test_zeros_of_padded_heads_do_not_count():
    inner = outer([0.2, 1.0], [1.0, 2.0, 3.0])
    padded = torch.zeros(5, 6)
    padded[1:3, :3] = inner
    found = step_scales([("a.weight", nn.Parameter(padded))])
    expected = step_scales([("a.weight", nn.Parameter(inner))])
    whole, part = (product(*each.values()) for each in (found, expected))
    torch.testing.assert_close(whole[1:3, :3], part)


def test_a_bias_moves_as_the_rows_of_its_matrix_and_a_norm_as_before():
    weight, bias, norm = nn.Parameter(outer([0.5, 2.0], [1.0, 1.0, 1.0])), nn.Parameter(torch.zeros(2)), torch.ones(3)
    scales = step_scales([("a.weight", weight), ("a.bias", bias), ("norm.weight", nn.Parameter(norm))])
    assert scales.keys() == {weight, bias}
    small, large = product(scales[bias])
    assert float(large / small) == pytest.approx(4)
    torch.testing.assert_close(product(scales[weight]), product(scales[bias])[:, None].expand(2, 3))


def test_the_reader_of_the_constant_channel_moves_as_a_bias():
    """It is zero where there was no bias to fold in, and must learn all the same."""
    module = nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.copy_(outer([0.5, 2.0], [1.0, 1.0, 0.0]))
    named = [("a.weight", module.weight), ("a.bias", module.bias)]
    frozen = ScaledSlice(module, "bias", 0, 1, 0.0)
    scales = step_scales(named, [ScaledSlice(module, "weight", 1, 2, 1 / 1024), frozen])
    torch.testing.assert_close(product(scales[module.weight])[:, 2], product(scales[module.bias]))
    torch.testing.assert_close(product(scales[module.weight])[:, :2], product(step_scales(named)[module.weight])[:, :2])


def test_a_matrix_of_zeros_is_finite():
    scales = step_scales([("a.weight", nn.Parameter(torch.zeros(2, 2)))])
    assert all(product(each).isfinite().all() for each in scales.values())
