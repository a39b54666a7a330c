"""Errors for arguments that do not fit: each says the value and the rule."""

import pytest
import torch
from torch import nn

from kvfold.attention import (
    KVCache,
    LatentAttention,
    absorb,
    apply_rotary,
    grouped_attention,
    latent_attention,
    rotary_frequencies,
    rotary_tables,
)
from kvfold.attention.drift.streams import make_layer_stream
from kvfold.attention.interface import blockwise_attention

QUERY = torch.zeros(2, 4, 3, 8)
KEY = torch.zeros(2, 2, 5, 8)
TABLES = rotary_tables(torch.arange(3), rotary_frequencies(4))


def grouped(query=QUERY, key=KEY, value=KEY, **options):
    return grouped_attention(query, key, value, **options)


def latent(rope):
    shapes = [(2, 4, 3, 6), rope, (2, 5, 9), (4, 6, 7), (4, 5, 7)]
    return latent_attention(*map(torch.zeros, shapes), absorbed=True)


def module(x):
    query, down, up, output = (
        nn.Linear(*size, bias=False) for size in ((8, 12), (8, 7), (5, 16), (8, 8))
    )
    sizes = {"heads": 2, "kv_rank": 5, "rope_dim": 2, "nope_dim": 4, "value_dim": 4}
    theta = rotary_frequencies(2)
    return LatentAttention(
        query=query, down=down, up=up, output=output, frequencies=theta, **sizes
    )(x)


def append(heads=2, learns=False):
    token = torch.zeros(2, heads, 1, 8, requires_grad=learns)
    return KVCache(2, 2, 8, 4).append(token, token)


CASES = {
    "query dims": lambda: grouped(QUERY[0]),
    "key heads": lambda: grouped(QUERY[:, :3]),
    "few keys": lambda: grouped(key=KEY[:, :, :2], value=KEY[:, :, :2]),
    "dtype": lambda: grouped(key=KEY.double()),
    "device": lambda: grouped(key=KEY.to("meta")),
    "offset": lambda: grouped(offset=3),
    "starts": lambda: grouped(starts=torch.zeros(2)),
    "lengths": lambda: grouped(lengths=torch.zeros(3, dtype=torch.int64)),
    "rotary queries": lambda: latent(rope=(2, 4, 2, 2)),
    "hidden states": lambda: module(torch.zeros(3, 8)),
    "absorb": lambda: absorb(nn.Linear(2, 2)),
    "odd dims": lambda: rotary_frequencies(5),
    "positions": lambda: apply_rotary(QUERY[:, :, :2], TABLES),
    "layout": lambda: apply_rotary(QUERY, TABLES, "mixed"),
    "cache heads": lambda: append(heads=3),
    "gradient": lambda: append(learns=True),
    "softcap": lambda: blockwise_attention(nn.Module(), QUERY, KEY, KEY, None, softcap=1.0),
    "model": lambda: make_layer_stream(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("call", CASES.values(), ids=CASES)
def test_a_wrong_argument_is_an_error_that_says_its_rule(call, refused):
    with refused(kind=ValueError):
        call()
