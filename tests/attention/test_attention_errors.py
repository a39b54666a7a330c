"""Errors for arguments that do not fit: each says the value and the rule."""

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

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


def profile(query: list[int], key: list[int], **options) -> Tensor:
    return distance_profile(torch.ones(query), torch.ones(key), 1.0, **options)


def other_model() -> nn.Module:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=8))


CASES = {
    "grouped_attention": [
        lambda: grouped(QUERY[0]),
        lambda: grouped(key=KEY[..., :6]),
        lambda: grouped(value=VALUE[:, :1, :4]),
        lambda: grouped(QUERY[:, :3]),
        lambda: grouped(key=KEY[:, :, :2], value=VALUE[:, :, :2]),
        lambda: grouped(key=KEY.double()),
        lambda: grouped(key=META),
        lambda: grouped(window=0),
        lambda: grouped(offset=-1),
        lambda: grouped(offset=3),
        lambda: grouped(offset=torch.tensor([1])),
        lambda: grouped(starts=torch.zeros(3, dtype=torch.long)),
        lambda: grouped(lengths=torch.zeros(2)),
        lambda: grouped(bias=torch.zeros(1, 4, 3, 4)),
        lambda: grouped(bias=torch.zeros(1, 2, 3, 5)),
    ],
    "latent_attention": [
        lambda: latent(rope=(2, 4, 2, 2)),
        lambda: latent(c=(2, 5, 8)),
        lambda: latent(up_key=(3, 6, 7)),
        lambda: latent(up_value=(4, 5, 6)),
        lambda: absorb(other_model()),
    ],
    "rotary": [
        lambda: rotary_frequencies(5),
        lambda: rotary_tables(torch.zeros(1, 2, 3), rotary_frequencies(4)),
        lambda: apply_rotary(QUERY[..., :2], POINTS),
        lambda: apply_rotary(QUERY[:, :, :2], POINTS),
        lambda: apply_rotary(QUERY, POINTS, "mixed"),
    ],
    "caches": [
        lambda: append(2, 3, 1, 8),
        lambda: append(2, 2, 5, 8, growing=False),
        lambda: append(2, 2, 1, 8, dtype=torch.bfloat16),
        lambda: append(2, 2, 1, 8, learns=True),
        lambda: KVCache(2, 0, 8),
        lambda: LatentCache(2, 6, 2).append(torch.zeros(2, 1, 9)),
        lambda: cache_bytes("gqa", 1, 1, torch.half, head_dim=2),
        lambda: cache_bytes("mha2", 1, 1, torch.half),
    ],
    "modules": [
        lambda: module(kv_heads=3),
        lambda: module(cross=True),
        lambda: module()(torch.zeros(3, 8)),
        lambda: module()(torch.zeros(1, 0, 8)),
        lambda: module(cross=True, causal=False)(torch.zeros(1, 2, 8)),
    ],
    "drift": [
        lambda: profile([2, 4, 5], [2, 4, 5, 3]),
        lambda: profile([2, 4, 5, 3], [2, 2, 6, 3]),
        lambda: profile([2, 4, 5, 3], [2, 3, 5, 3]),
        lambda: profile([2, 4, 5, 3], [2, 2, 5, 3], window=0),
        lambda: row_kl(QUERY, QUERY, QUERY[:, :2], QUERY, 1.0, 1.0),
        lambda: blockwise_attention(nn.Module(), QUERY, KEY, VALUE, None, softcap=1.0),
        lambda: as_stream(3),
        lambda: as_stream(nn.Linear(2, 2)),
    ],
}


@pytest.mark.parametrize("calls", CASES.values(), ids=CASES)
def test_a_wrong_argument_is_an_error_that_says_its_rule(calls, refused):
    for call in calls:
        with refused(ValueError):
            call()
