"""Finding NaN and infinity, wherever they are."""

import pytest
import torch

from kvfold.convert.checkpoint.tensors import count_non_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_anywhere(dtype: torch.dtype, value: float) -> None:
    for size in (1, 7, 64, 1001):
        tensor = torch.linspace(-3, 3, size).to(dtype)
        assert count_non_finite(tensor) == 0
        for position in {0, size // 3, size // 2, size - 1}:
            bad = tensor.clone()
            bad[position] = value
            assert count_non_finite(bad) == 1


def test_the_largest_values_are_finite_and_all_bad_ones_are_counted() -> None:
    largest = torch.full((10,), torch.finfo(torch.float32).max)
    assert count_non_finite(largest) == 0
    largest[2:5] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert count_non_finite(largest.reshape(5, 2).T) == 3


def test_what_has_no_such_values() -> None:
    assert count_non_finite(torch.zeros(0)) == 0
    assert count_non_finite(torch.arange(3)) == 0
    assert count_non_finite(torch.ones(3, dtype=torch.bool)) == 0
