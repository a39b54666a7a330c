"""Attention sinks: a layer fitted with tokens weighted by received attention, and a channel for a
live norm.
"""

from dataclasses import replace

import torch
from helpers.layers import attend, normal, plain_rotary, relative_error, statistics_of

from kvfold.attention.drift.profile import sum_attention_by_distance_and_key
from kvfold.convert.transforms.fold import principal
from kvfold.convert.transforms.latent.latent_weights import LatentWeights
from kvfold.convert.transforms.latent.variants import adapt_to_norm, add_sink_channel
from kvfold.convert.transforms.weights import AttentionWeights

E = 32
H = 4
D = 8
T = 256
R = 6
STILL = plain_rotary(0)
ALL = [[0, 1, 2, 3]]


def layer(sink):
    """Four heads whose queries all look for the first input dim: ``sink`` is its score."""
    q, k, v = (normal(seed, H, D, E) / E**0.5 for seed in (1, 2, 3))
    looked_for = normal(5, H, D)
    k[..., 0] = sink * looked_for / looked_for.square().sum(-1, keepdim=True)
    v[..., 0] *= 0.05
    return AttentionWeights(q, k, v, normal(4, E, H, D) / E**0.5, q_bias=looked_for * D**0.5)


def inputs(seed):
    """``[4, T, E]``: only the first token has anything in the first dim."""
    x = normal(seed, 4, T, E)
    x[..., 0] = 0
    x[:, 0] *= 0.1
    x[:, 0, 0] = 1
    return x


def measured(weights, x):
    query, key = (torch.einsum("hde,bte->bhtd", rows, x) for rows in (weights.q, weights.k))
    assert weights.q_bias is not None
    _, received = sum_attention_by_distance_and_key(query + weights.q_bias[:, None], key, D**-0.5)
    flat = x.flatten(0, 1)
    weight = received.flatten()
    gram = (flat * weight[:, None]).T @ flat / len(flat)
    mean = weight @ flat / len(flat)
    return replace(statistics_of(x, H), received_gram=gram, received_mean=mean)


def test_a_sink_needs_tokens_weighted_by_received_attention():
    weights = layer(sink=10.0)
    held_out = inputs(8)
    expected = attend(weights, held_out, STILL)

    def error(folded):
        return relative_error(attend(folded, held_out, STILL), expected)

    statistics = measured(weights, inputs(7))
    plain, weighted = (
        error(principal.fold_heads(principal.compute_layer_moments(weights, counted, STILL), ALL))
        for counted in statistics.list_token_weightings()
    )
    assert weighted < 0.9 * plain


def latent():
    """Almost nothing of the sink is in the latent."""
    down = normal(2, R, E)
    down[:, 0] = 0.02
    zeros = torch.zeros(0, E, dtype=torch.float64)
    return LatentWeights(
        down,
        zeros,
        normal(3, H, D, E),
        torch.zeros(H, 0, E),
        normal(4, H, D, R),
        normal(5, H, D, R),
        normal(6, E, H, D),
        torch.zeros(0),
        1.0,
    )


def values(weights, x, live=True):
    """The values ``[B, H, T, D]``, behind a live norm or without it."""
    c = x @ weights.down.mT
    c = c * c.square().mean(-1, keepdim=True).rsqrt() if live else c
    return torch.einsum("hdr,btr->bhtd", weights.uv, c)


def test_behind_a_live_norm_a_channel_without_readers_keeps_the_sink_short():
    x = inputs(7)
    plain = latent()
    statistics = measured(layer(sink=10.0), x)
    damped = add_sink_channel(plain, statistics)
    length = (x @ damped.down[R]).square()
    assert length[:, 0].min() > 20 * length[:, 1:].mean()
    torch.testing.assert_close(damped.uv[..., :R], plain.uv)
    assert not damped.uv[..., R:].any()
    assert not damped.uk[..., R:].any()
    expected = values(plain, x, live=False)
    sizes = [
        (values(adapt_to_norm(each, x), x) - expected)[:, :, 0].norm() for each in (plain, damped)
    ]
    assert sizes[1] < 0.2 * sizes[0]
