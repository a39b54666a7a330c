"""Calibration statistics of a layer, against the same sums written out in float64."""

import pytest
import torch
from torch import Tensor

from kvfold.attention.drift.streams import LayerOutput
from kvfold.convert.walk.statistics import StatisticsAccumulator, add_gram


def output(inputs: Tensor, query: Tensor | None = None, key: Tensor | None = None, **options: object) -> LayerOutput:
    return LayerOutput(None, inputs, inputs, query, key, **options)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64])
def test_gram_and_mean_equal_float64(width: int) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(batch, 11, width) * 3 + 1 for batch in (2, 5, 1)]
    accumulator = StatisticsAccumulator(profile=False)
    for part in parts:
        accumulator.add(output(part))
    found = accumulator.result()
    rows = torch.cat([part.flatten(0, 1) for part in parts]).double()
    assert found.tokens == 88
    assert found.gram.dtype == found.mean.dtype == torch.float64
    torch.testing.assert_close(found.gram, rows.T @ rows / 88, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(found.mean, rows.mean(0), rtol=1e-14, atol=1e-14)
    assert torch.equal(found.gram, found.gram.T)
    assert found.profile.shape == (0, 0)


def test_float32_activations_lose_nothing_where_a_float32_sum_would() -> None:
    """A direction of size 1e-4 beside one of size 1e4, over many tokens: float32 sums lose the small one."""
    torch.manual_seed(0)
    inputs = torch.randn(8, 512, 2) * torch.tensor([1e4, 1e-4])
    accumulator = StatisticsAccumulator(profile=False)
    accumulator.add(output(inputs))
    found = accumulator.result()
    exact = inputs.flatten(0, 1).double()
    exact = exact.T @ exact / exact.shape[0]
    torch.testing.assert_close(found.gram, exact, rtol=1e-13, atol=1e-13)
    in_float32 = (inputs.flatten(0, 1).T @ inputs.flatten(0, 1) / 4096).double()
    assert (torch.linalg.det(found.gram) - torch.linalg.det(exact)).abs() < 1e-9 * torch.linalg.det(exact).abs()
    assert (in_float32 - exact).abs().max() > 1e3 * (found.gram - exact).abs().max()


def test_profiles_of_batches_of_different_sizes_average_over_sequences() -> None:
    torch.manual_seed(0)
    heads, length, dim = 4, 9, 8
    query, key = torch.randn(5, heads, length, dim), torch.randn(5, 2, length, dim)
    inputs = torch.randn(5, length, 3)
    accumulator = StatisticsAccumulator()
    for part in (slice(0, 2), slice(2, 5)):
        accumulator.add(output(inputs[part], query[part], key[part], scale=0.7, window=4, softcap=2.0))
    scores = 0.7 * query.double() @ key.double().repeat_interleave(2, 1).mT
    scores = 2 * torch.tanh(scores / 2)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    weights = scores.masked_fill((distance < 0) | (distance >= 4), -torch.inf).softmax(-1).mean(0)
    expected = torch.stack([weights.diagonal(-delta, -2, -1).sum(-1) for delta in range(length)], -1) / length
    torch.testing.assert_close(accumulator.result().profile, expected, rtol=1e-5, atol=1e-7)


def test_received_attention_counts_tokens() -> None:
    torch.manual_seed(0)
    query, key, inputs = torch.randn(5, 4, 9, 8), torch.randn(5, 2, 9, 8), torch.randn(5, 9, 3)
    accumulator = StatisticsAccumulator()
    for part in (slice(0, 2), slice(2, 5)):
        accumulator.add(output(inputs[part], query[part], key[part], scale=0.7))
    scores = 0.7 * query.double() @ key.double().repeat_interleave(2, 1).mT
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    received = scores.masked_fill(hidden, -torch.inf).softmax(-1).mean(1).sum(1).flatten()
    rows, found = inputs.flatten(0, 1).double(), accumulator.result()
    assert found.received_gram is not None
    torch.testing.assert_close(found.received_gram, (rows * received[:, None]).T @ rows / 45, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.received_mean, received @ rows / 45, rtol=1e-5, atol=1e-6)


def test_a_profile_needs_queries() -> None:
    with pytest.raises(ValueError, match="a distance profile needs the layer's queries and keys"):
        StatisticsAccumulator().add(output(torch.randn(1, 4, 3)))


def test_no_batches_no_result() -> None:
    with pytest.raises(ValueError, match="expected at least one batch, found none"):
        StatisticsAccumulator().result()


def test_add_gram_leaves_what_is_below_the_diagonal_blocks() -> None:
    gram = torch.zeros(8, 8, dtype=torch.float64)
    add_gram(gram, torch.ones(3, 8, dtype=torch.float64))
    assert torch.equal(gram.triu(), torch.full((8, 8), 3.0, dtype=torch.float64).triu())
    assert not gram[2:, :2].any()
