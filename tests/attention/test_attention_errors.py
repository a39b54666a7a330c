"""Errors for arguments that do not fit: each says the value and the rule."""

import pytest
import torch
from torch import Tensor, nn

from kvfold.attention import (
    GroupedAttention,
    KVCache,
    LatentCache,
    absorb,
    apply_rotary,
    cache_bytes,
    distance_profile,
    grouped_attention,
    latent_attention,
    rotary_frequencies,
    rotary_tables,
    row_kl,
)
from kvfold.attention.drift.streams import as_stream
from kvfold.attention.interface import blockwise_attention

QUERY = torch.zeros(2, 4, 3, 8)
KEY = torch.zeros(2, 2, 5, 8)
VALUE = torch.zeros(2, 2, 5, 8)
META = torch.zeros(2, 2, 5, 8, device="meta")
POINTS = rotary_tables(torch.arange(3), rotary_frequencies(4))


def grouped(query: Tensor = QUERY, key: Tensor = KEY, value: Tensor = VALUE, **options) -> Tensor:
    return grouped_attention(query, key, value, **options)


def latent(rope=(2, 4, 3, 2), c=(2, 5, 9), up_key=(4, 6, 7), up_value=(4, 5, 7)) -> Tensor:
    shapes = ((2, 4, 3, 6), rope, c, up_key, up_value)
    return latent_attention(*(torch.zeros(shape) for shape in shapes), absorbed=True)


def append(*shape: int, learns: bool = False, **options) -> object:
    tokens = torch.zeros(shape, requires_grad=learns)
    return KVCache(2, 2, 8, 4, **options).append(tokens, tokens)


def module(heads: int = 4, kv_heads: int = 2, **options) -> GroupedAttention:
    layers = {
        name: nn.Linear(8, width) for name, width in (("query", 16), ("key", 8), ("value", 8))
    }
    return GroupedAttention(
        **layers, output=nn.Linear(16, 8), heads=heads, kv_heads=kv_heads, head_dim=4, **options
    )


CASES = {
    "query dims": lambda: grouped(QUERY[0]),
    "key dims": lambda: grouped(key=KEY[..., :6]),
    "key heads": lambda: grouped(QUERY[:, :3]),
    "few keys": lambda: grouped(key=KEY[:, :, :2], value=VALUE[:, :, :2]),
    "dtype": lambda: grouped(key=KEY.double()),
    "device": lambda: grouped(key=META),
    "window": lambda: grouped(window=0),
    "offset": lambda: grouped(offset=3),
    "offsets": lambda: grouped(offset=torch.tensor([1])),
    "lengths": lambda: grouped(lengths=torch.zeros(2)),
    "bias keys": lambda: grouped(bias=torch.zeros(1, 4, 3, 4)),
    "bias heads": lambda: grouped(bias=torch.zeros(1, 2, 3, 5)),
    "rotary queries": lambda: latent(rope=(2, 4, 2, 2)),
    "latent dims": lambda: latent(c=(2, 5, 8)),
    "up-projections": lambda: latent(up_value=(4, 5, 6)),
    "absorb": lambda: absorb(nn.Linear(2, 2)),
    "odd dims": lambda: rotary_frequencies(5),
    "rotary dims": lambda: apply_rotary(QUERY[..., :2], POINTS),
    "positions": lambda: apply_rotary(QUERY[:, :, :2], POINTS),
    "layout": lambda: apply_rotary(QUERY, POINTS, "mixed"),
    "cache heads": lambda: append(2, 3, 1, 8),
    "capacity": lambda: append(2, 2, 5, 8, growing=False),
    "cache dtype": lambda: append(2, 2, 1, 8, dtype=torch.bfloat16),
    "gradient": lambda: append(2, 2, 1, 8, learns=True),
    "cached latent": lambda: LatentCache(2, 6, 2).append(torch.zeros(2, 1, 9)),
    "missing size": lambda: cache_bytes("gqa", 1, 1, torch.half, head_dim=2),
    "variant": lambda: cache_bytes("mha2", 1, 1, torch.half),
    "module heads": lambda: module(kv_heads=3),
    "causal cross attention": lambda: module(cross=True),
    "hidden dims": lambda: module()(torch.zeros(3, 8)),
    "no tokens": lambda: module()(torch.zeros(1, 0, 8)),
    "no memory": lambda: module(cross=True, causal=False)(torch.zeros(1, 2, 8)),
    "profile": lambda: distance_profile(QUERY, KEY, 1.0),
    "row KL": lambda: row_kl(QUERY, QUERY, QUERY[:, :2], QUERY, 1.0, 1.0),
    "softcap": lambda: blockwise_attention(nn.Module(), QUERY, KEY, VALUE, None, softcap=1.0),
    "stream": lambda: as_stream(3),
    "model": lambda: as_stream(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("call", CASES.values(), ids=CASES)
def test_a_wrong_argument_is_an_error_that_says_its_rule(call, refused):
    with refused(ValueError):
        call()
