"""Attention sinks: a layer fitted with tokens counted alike, and by the attention that they receive."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvfold.attention.drift.profile import attention_sums
from kvfold.convert.transforms.fold import principal
from kvfold.convert.transforms.sinks import SHARES, judged
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics
from tests.helpers.layers import attend, normal, plain_rotary, relative_error, statistics_of

E, H, D, T = 32, 4, 8, 256
STILL = plain_rotary(0)
ALL = [[0, 1, 2, 3]]


def layer(sink: float) -> AttentionWeights:
    """Four heads whose queries all look for the first input dim: ``sink`` is its score."""
    q, k, v = (normal(seed, H, D, E) / E**0.5 for seed in (1, 2, 3))
    looked_for = normal(5, H, D)
    k[..., 0] = sink * looked_for / looked_for.square().sum(-1, keepdim=True)
    v[..., 0] *= 0.05
    return AttentionWeights(q, k, v, normal(4, E, H, D) / E**0.5, q_bias=looked_for * D**0.5)


def inputs(seed: int) -> Tensor:
    """``[4, T, E]``: only the first token has anything in the first dim."""
    x = normal(seed, 4, T, E)
    x[..., 0] = 0
    x[:, 0] *= 0.1
    x[:, 0, 0] = 1
    return x


def measured(weights: AttentionWeights, x: Tensor) -> LayerStatistics:
    query, key = (torch.einsum("hde,bte->bhtd", rows, x) for rows in (weights.q, weights.k))
    assert weights.q_bias is not None
    _, received = attention_sums(query + weights.q_bias[:, None], key, D**-0.5)
    flat, weight = x.flatten(0, 1), received.flatten()
    gram, mean = (flat * weight[:, None]).T @ flat / len(flat), weight @ flat / len(flat)
    return replace(statistics_of(x, H), received_gram=gram, received_mean=mean)


def test_a_sink_needs_tokens_counted_by_received_attention() -> None:
    weights, held_out = layer(sink=10.0), inputs(8)
    expected = attend(weights, held_out, STILL)

    def error(folded: AttentionWeights) -> float:
        return relative_error(attend(folded, held_out, STILL), expected)

    best = judged(measured(weights, inputs(7)), lambda counted: principal.fold(weights, counted, STILL, ALL), error)
    assert best.share == max(SHARES)
    assert best.errors[best.share] < 0.9 * best.errors[0.0]
    assert error(best.weights) == best.errors[best.share]


def test_the_judge_decides() -> None:
    statistics = measured(layer(sink=10.0), inputs(7))
    sizes = {float(statistics.counting_received(share).gram[0, 0]): share for share in SHARES}
    best = judged(statistics, lambda counted: float(counted.gram[0, 0]), lambda size: 1.0 - sizes[size])
    assert (best.share, best.errors) == (0.5, {0.0: 1.0, 0.5: 0.5})
    assert sizes[best.weights] == 0.5


def test_the_first_of_equals_counts_tokens_alike() -> None:
    statistics = measured(layer(sink=10.0), inputs(7))
    assert judged(statistics, lambda counted: counted, lambda counted: 1.0).weights is statistics


def test_without_received_attention_nothing_is_judged() -> None:
    plain = statistics_of(inputs(7), H)
    best = judged(plain, lambda counted: counted, lambda counted: pytest.fail("judged"))
    assert best.weights is plain
    assert (best.share, best.errors) == (0.0, {})
    with pytest.raises(ValueError, match="averages by received attention are missing"):
        plain.counting_received(0.5)


def test_counting_received_mixes_the_averages() -> None:
    statistics = measured(layer(sink=10.0), inputs(7))
    assert statistics.received_gram is not None
    mixed = statistics.counting_received(0.25)
    torch.testing.assert_close(mixed.gram, 0.75 * statistics.gram + 0.25 * statistics.received_gram)
    torch.testing.assert_close(mixed.mean, 0.75 * statistics.mean + 0.25 * statistics.received_mean)
