"""Calibration statistics of a layer, against the same sums written out in float64."""

import pytest
import torch
from helpers import precision
from helpers.attention import attention_maps, random_tokens
from torch.testing import assert_close

from kvfold.attention.drift.recording import LayerOutput
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.families.layer_io import read_attention_weights
from kvfold.convert.families.model import make_model
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.transforms.weights import AttentionWeights, HeadNorm
from kvfold.convert.walk.statistics import StatisticsAccumulator, compute_queries_and_keys


def output(inputs, query=None, key=None, **options):
    return LayerOutput(None, inputs, inputs, query, key, **options)


@pytest.mark.parametrize("width", [1, 3, 64])
def test_gram_and_mean_equal_float64(width):
    torch.manual_seed(0)
    parts = [torch.randn(batch, 11, width) * 3 + 1 for batch in (2, 5, 1)]
    accumulator = StatisticsAccumulator()
    for part in parts:
        query, key = torch.randn(2, len(part), 1, 11, 4)
        accumulator.add_batch(output(part, query, key, scale=0.5))
    found = accumulator.average_batches()
    rows = torch.cat([part.flatten(0, 1) for part in parts]).double()
    assert found.tokens == 88
    assert found.gram.dtype == found.mean.dtype == torch.float64
    assert_close(found.gram, rows.T @ rows / 88, rtol=1e-14, atol=1e-14)
    assert_close(found.mean, rows.mean(0), rtol=1e-14, atol=1e-14)
    assert torch.equal(found.gram, found.gram.T)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, 2.0)])
def test_profiles_and_received_attention_average_over_sequences(window, softcap):
    """In batches of different sizes."""
    torch.manual_seed(0)
    query = torch.randn(5, 4, 9, 8)
    key = torch.randn(5, 2, 9, 8)
    inputs = torch.randn(5, 9, 3)
    accumulator = StatisticsAccumulator()
    for part in (slice(0, 2), slice(2, 5)):
        accumulator.add_batch(
            output(inputs[part], query[part], key[part], scale=0.7, window=window, softcap=softcap)
        )
    distance = torch.arange(9)[:, None] - torch.arange(9)
    seen = (distance >= 0) & (distance < (window or 9))
    weights = attention_maps(query.double(), key.double(), 0.7, seen, softcap)
    mean = weights.mean(0)
    found = accumulator.average_batches()
    profile = torch.stack([mean.diagonal(-delta, -2, -1).sum(-1) for delta in range(9)], -1) / 9
    assert_close(found.profile, profile, rtol=1e-5, atol=1e-7)
    rows = inputs.flatten(0, 1).double()
    received = weights.mean(1).sum(1).flatten()
    assert found.received_gram is not None
    assert_close(
        found.received_gram, (rows * received[:, None]).T @ rows / 45, **precision.ACTIVATIONS
    )
    assert_close(found.received_mean, received @ rows / 45, **precision.ACTIVATIONS)


def test_what_is_behind_norms_is_averaged_with_the_inputs():
    torch.manual_seed(0)
    norm = HeadNorm("rms", torch.rand(2, 4) + 0.5)
    weights = AttentionWeights(*torch.randn(3, 2, 4, 3), torch.randn(3, 2, 4), k_norm=norm)
    inputs = torch.randn(5, 9, 3)
    query, key = torch.randn(2, 5, 2, 9, 4)
    accumulator = StatisticsAccumulator(weights=weights)
    plain = StatisticsAccumulator()
    for part in (slice(0, 2), slice(2, 5)):
        for each in (accumulator, plain):
            each.add_batch(output(inputs[part], query[part], key[part], scale=0.5))
    found = accumulator.average_batches()
    assert plain.average_batches().normed is None
    assert torch.equal(found.gram, plain.average_batches().gram)
    x = inputs.flatten(0, 1).double()
    queries, keys = (
        torch.einsum("hde,ne->nhd", weight.double(), x) for weight in (weights.q, weights.k)
    )
    divisors = (keys.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    rows = torch.cat([queries, keys / divisors * norm.weight.double()], 1)
    extended = torch.cat([x, torch.ones(45, 1, dtype=torch.float64)], 1)
    assert_close(found.normed, torch.einsum("nhd,ne->hde", rows, extended) / 45)
    assert_close(found.divisors[:2, :2], torch.ones(2, 2, dtype=torch.float64))
    assert_close(found.divisors[2:, 0], divisors[..., 0].mean(0))
    seen = torch.ones(9, 9).tril() > 0
    maps = attention_maps(query.double(), key.double(), 0.5, seen)
    received = maps.sum((1, 2)).flatten()
    expected = torch.einsum("n,nhd,ne->hde", received / received.sum(), rows, extended)
    assert_close(found.received_normed, expected, **precision.ACTIVATIONS)


RW = {
    "alibi": True,
    "new_decoder_architecture": False,
    "multi_query": False,
    "parallel_attn": False,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "changes"), [("bloom", {}), ("falcon", RW)])
@torch.no_grad()
def test_alibi_is_one_more_dim_of_queries_and_keys(name, changes, dtype, tiny_family):
    """So far along a text that steps of one position are rounded away in 16 bits, in which Falcon
    computes them.
    """
    checkpoint = open_checkpoint(tiny_family(name, **changes))
    model = make_model(checkpoint.config, checkpoint.tensors)
    stream = CheckpointStream(
        checkpoint.config, checkpoint.read_tensor, list(checkpoint.tensors), dtype=dtype
    )
    hidden = stream.embed(random_tokens(1, 600))
    scale = model.layers[0].scale
    weights = read_attention_weights(model, 0, checkpoint.read_tensor)
    with stream.open_layer(0) as layer:
        found = compute_queries_and_keys(layer(hidden), weights, model, 0, layer.arguments(hidden))
    assert found.query is not None
    assert found.key is not None
    # Of H heads, a power of two, head h = 1 .. H has the slope 2^(-8 h / H).
    count = weights.heads
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / count) for head in range(count)])
    expected = slopes * (scale if name == "falcon" else 1.0)
    steps = found.key[0, 0, :, -1]
    assert_close(steps, torch.arange(600.0))
    assert_close(found.query[0, :, 0, -1] * scale, expected, rtol=4e-3, atol=0.0)
