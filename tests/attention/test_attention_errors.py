"""Errors for arguments that do not fit: the argument, what was expected, what was found."""

import re

import pytest
import torch
from torch import Tensor

from kvfold.attention import (
    KVCache,
    LatentCache,
    absorbed_projections,
    apply_rotary,
    cache_bytes,
    grouped_attention,
    latent_attention,
    rotary_frequencies,
    rotary_tables,
)

QUERY, KEY, VALUE = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8)
META = torch.zeros(2, 2, 5, 8, device="meta")
POINTS = rotary_tables(torch.arange(3), rotary_frequencies(4))


def grouped(query: Tensor = QUERY, key: Tensor = KEY, value: Tensor = VALUE, **options) -> Tensor:
    return grouped_attention(query, key, value, **options)


def latent(
    nope=(2, 4, 3, 6), rope=(2, 4, 3, 2), c=(2, 5, 9), up_key=(4, 6, 7), up_value=(4, 5, 7), **options
) -> Tensor:
    shapes = (nope, rope, c, up_key, up_value)
    return latent_attention(*(torch.zeros(shape) for shape in shapes), absorbed=True, **options)


def append(*shape: int, **options) -> object:
    return KVCache(2, 2, 8, 4, **options).append(torch.zeros(shape), torch.zeros(shape))


CASES = [
    (lambda: grouped(QUERY[0]), "query: expected 4 dims [B, H, T, D], found shape [4, 3, 8]"),
    (lambda: grouped(key=KEY[..., :6]), "key: expected shape [B, G, S, D] with D = 8, found [2, 2, 5, 6]"),
    (lambda: grouped(key=KEY[:1]), "key: expected shape [B, G, S, D] with B = 2, found [1, 2, 5, 8]"),
    (
        lambda: grouped(value=VALUE[:, :1, :4]),
        "value: expected shape [B, G, S, Dv] with G = 2, S = 5, found [2, 1, 4, 8]",
    ),
    (lambda: grouped(QUERY[:, :3]), "key: expected a number that divides the query heads H = 3, found 2"),
    (
        lambda: grouped(key=KEY[:, :, :2], value=VALUE[:, :, :2]),
        "key: expected at least as many keys as queries, T = 3, found S = 2",
    ),
    (lambda: grouped(key=KEY.double()), "key: expected dtype torch.float32 as in query, found torch.float64"),
    (lambda: grouped(value=VALUE.half()), "value: expected dtype torch.float32 as in query, found torch.float16"),
    (lambda: grouped(key=META), "key: expected device cpu as in query, found meta"),
    (lambda: grouped(window=0), "window: expected at least 1, found 0"),
    (lambda: grouped(offset=-1), "offset: expected at least 0, found -1"),
    (lambda: grouped(offset=3), "offset: expected at most S - T = 2, so that every query has its own key, found 3"),
    (lambda: grouped(offset=torch.tensor([1])), "offset: expected shape [B] with B = 2, found [1]"),
    (lambda: grouped(starts=torch.zeros(3, dtype=torch.long)), "starts: expected shape [B] with B = 2, found [3]"),
    (
        lambda: grouped(lengths=torch.zeros(2)),
        "lengths: expected dtype torch.int64 or torch.int32, found torch.float32",
    ),
    (
        lambda: grouped(bias=torch.zeros(1, 4, 3, 4)),
        "bias: expected shape [B, H, T, S] with S = 5, found [1, 4, 3, 4]",
    ),
    (lambda: grouped(bias=torch.zeros(1, 2, 3, 5)), "bias: expected H = 1 or 4, found 2 in shape [1, 2, 3, 5]"),
    (
        lambda: latent(rope=(2, 4, 2, 2)),
        "query_rope: expected shape [B, H, T, P] with T = 3, found [2, 4, 2, 2]",
    ),
    (lambda: latent(c=(2, 5, 8)), "latent: expected shape [B, S, R+P] with R+P = 9, found [2, 5, 8]"),
    (lambda: latent(up_key=(3, 6, 7)), "up_key: expected shape [H, Dn, R] with H = 4, found [3, 6, 7]"),
    (lambda: latent(up_value=(4, 5, 6)), "up_value: expected shape [H, Dv, R] with R = 7, found [4, 5, 6]"),
    (lambda: rotary_frequencies(5), "dims: expected an even number of rotary dims, found 5"),
    (
        lambda: rotary_tables(torch.zeros(1, 2, 3), rotary_frequencies(4)),
        "positions: expected [T] or [B, T], found shape [1, 2, 3]",
    ),
    (lambda: apply_rotary(QUERY[..., :2], POINTS), "x: head dim D: expected at least 4, found 2"),
    (
        lambda: apply_rotary(QUERY[:, :, :2], POINTS),
        "tables: expected positions for B = 2 (or 1) and T = 2, found B = 1 and T = 3",
    ),
    (lambda: apply_rotary(QUERY, POINTS, "mixed"), "layout: expected 'half' or 'interleaved', found 'mixed'"),
    (lambda: append(2, 3, 1, 8), "key: expected shape [B, G, T, D] with G = 2, found [2, 3, 1, 8]"),
    (lambda: append(2, 2, 5, 8, growing=False), "capacity: expected at least 5 slots for the new tokens, found 4"),
    (
        lambda: append(2, 2, 1, 8, dtype=torch.bfloat16),
        "key: expected dtype torch.bfloat16 as in the cache, found torch.float32",
    ),
    (lambda: KVCache(2, 0, 8), "kv_heads: expected at least 1, found 0"),
    (
        lambda: LatentCache(2, 6, 2).append(torch.zeros(2, 1, 9)),
        "latent: expected shape [B, T, R+P] with R+P = 8, found [2, 1, 9]",
    ),
    (
        lambda: cache_bytes("gqa", 1, 1, torch.half, head_dim=2),
        "kv_heads: expected a number, which gqa needs, found None",
    ),
    (
        lambda: cache_bytes("mha2", 1, 1, torch.half),
        "variant: expected 'mha', 'gqa', 'mqa' or 'mla', found 'mha2'",
    ),
    (
        lambda: absorbed_projections(*(torch.zeros(s) for s in ((4, 6, 9), (4, 6, 7), (4, 5, 8), (9, 4, 5)))),
        "W_uv: expected shape [H, Dv, R] with R = 7, found [4, 5, 8]",
    ),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message for _, message in CASES])
def test_message(call, message):
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        call()
