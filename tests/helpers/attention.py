"""Yardsticks of the attention tests: the naive formula in any dtype, the reference's loops, and the
bound on errors.

The rule of every precision test: the error against float64 is at most twice that of the formula
written out naively in the tested dtype, or twice the rounding of the exact result to that dtype
where the naive formula was luckier than that; for float32 on a GPU, or eight units of it at the
size of the results.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from helpers import reference
from kvfold.attention import GroupedAttention, LatentAttention, rotary_frequencies


@dataclass(frozen=True)
class Case:
    """Mask arguments of one call; ``offset`` ``None`` means ``S - T``."""

    causal: bool = True
    offset: int | None = None
    window: int | None = None
    starts: Tensor | None = None
    lengths: Tensor | None = None

    def visible(self, batch, queries, keys):
        """The mask as a matrix ``[B, 1, T, S]``, straight from its definition, on the CPU."""
        offset = keys - queries if self.offset is None else self.offset
        position = offset + torch.arange(queries)[None, :, None]
        key = torch.arange(keys)
        seen = torch.ones(batch, queries, keys, dtype=torch.bool)
        if self.causal:
            seen = seen & (key <= position)
        if self.window is not None:
            seen = seen & (position - key < self.window)
        if self.starts is not None:
            seen = seen & (key >= self.starts[:, None, None])
        if self.lengths is not None:
            seen = seen & (key < self.lengths[:, None, None])
        return seen[:, None]


def naive(query, key, value, case, scale=None):
    """``grouped_attention`` as matrix product, mask, softmax, matrix product, every step in the
    inputs' dtype.
    """
    seen = case.visible(query.shape[0], query.shape[2], key.shape[2]).to(query.device)
    some = seen.any(-1, keepdim=True)
    # rows that see nothing are kept finite, for their gradients' sake, and cut away after the
    # softmax
    weights = attention_maps(query, key, scale or query.shape[-1] ** -0.5, seen | ~some)
    share = query.shape[1] // key.shape[1]
    return torch.where(some, weights, 0.0) @ value.repeat_interleave(share, 1)


def expand(nope, rope, latent, up_key, up_value):
    """The queries, keys and values of every head of latent attention, written out."""
    rank = up_key.shape[-1]
    c = latent[..., :rank]
    shared = latent[:, None, :, rank:].expand(-1, nope.shape[1], -1, -1)
    key, value = (torch.einsum("bsr,hdr->bhsd", c, up) for up in (up_key, up_value))
    return torch.cat([nope, rope], -1), torch.cat([key, shared], -1), value


def naive_latent(nope, rope, latent, up_key, up_value, case, absorbed):
    """``latent_attention`` in the same way."""
    if not absorbed:
        return naive(*expand(nope, rope, latent, up_key, up_value), case)
    query = torch.cat([nope @ up_key, rope], -1)
    value = latent[:, None, :, : up_key.shape[-1]]
    scale = (nope.shape[-1] + rope.shape[-1]) ** -0.5
    return naive(query, latent[:, None], value, case, scale) @ up_value.mT


def exact(query, key, value, case):
    """The reference's loops, in float64 on the CPU: ``[B, H, T, Dv]``."""
    seen = case.visible(len(query), query.shape[2], key.shape[2])[:, 0]
    rows = zip(*(x.cpu().double() for x in (query, key, value)), seen, strict=True)
    return torch.stack([reference.attend_grouped_heads(*row) for row in rows])


def exact_latent(nope, rope, latent, up_key, up_value, case):
    """The reference's loops over explicit keys and values, in float64 on the CPU: ``[B, H, T,
    Dv]``.
    """
    inputs = (x.cpu().double() for x in (nope, rope, latent, up_key, up_value))
    return exact(*expand(*inputs), case)


def error(result, exact):
    """Root mean square of the difference."""
    return (result.detach().cpu().double() - exact).square().mean().sqrt().item()


def assert_precise(result, plain, exact):
    """The rule above; ``plain`` is the naive formula's result in the same dtype, ``exact`` that of
    float64.
    """
    assert result.dtype == plain.dtype
    assert result.shape == exact.shape
    if result.numel() == 0:
        return
    limit = max(error(plain, exact), error(exact.to(result.dtype), exact))
    if result.is_cuda and result.dtype == torch.float32:
        # four units at the results' size: fused kernels had up to that, on an H200
        length = exact.square().mean().sqrt().item()
        limit = max(limit, 4 * torch.finfo(torch.float32).eps * length)
    size = error(result, exact)
    assert size <= 2 * limit, (
        f"{size:.3e} > twice {limit:.3e} in {result.dtype} {list(result.shape)}"
    )


def grouped_module(kv_heads, **options):
    """A random layer ``[B, T, 64] -> [B, T, 64]`` with 4 query heads of dim 16 and values of dim
    12, or 16 with MHA, for which torch has a fused kernel.
    """
    value_dim = 16 if kv_heads == 4 else 12
    return GroupedAttention(
        query=nn.Linear(64, 64),
        key=nn.Linear(64, kv_heads * 16),
        value=nn.Linear(64, kv_heads * value_dim),
        output=nn.Linear(4 * value_dim, 64),
        heads=4,
        kv_heads=kv_heads,
        head_dim=16,
        value_dim=value_dim,
        **options,
    )


def latent_module(query_rank=None, **options):
    """A random layer ``[B, T, 64] -> [B, T, 64]`` with 4 heads, and a query latent if it has a
    rank.
    """
    query = nn.Linear(query_rank or 64, 96, bias=False)
    if query_rank:
        query = nn.Sequential(nn.Linear(64, query_rank, bias=False), query)
    return LatentAttention(
        query=query,
        down=nn.Linear(64, 40, bias=False),
        up=nn.Linear(32, 112, bias=False),
        output=nn.Linear(48, 64, bias=False),
        heads=4,
        kv_rank=32,
        rope_dim=8,
        nope_dim=16,
        value_dim=12,
        frequencies=rotary_frequencies(8),
        **options,
    )


def small_modules():
    """A random module of each variant."""
    torch.manual_seed(0)
    rotary = {"frequencies": rotary_frequencies(16)}
    return {
        "mha": grouped_module(4, **rotary),
        "gqa": grouped_module(2, **rotary),
        "mqa window": grouped_module(1, window=3, **rotary),
        "mla": latent_module(),
        "mla window": latent_module(8, window=3),
    }


def attention_maps(query, key, scale, seen, softcap=None, sinks=None):
    """The textbook formula in the dtype of its inputs: ``[B, H, T, S]``."""
    batch, heads, length, _ = query.shape
    scores = scale * (query @ key.repeat_interleave(heads // key.shape[1], 1).mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores)[:, None, None].expand(batch, heads, length, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def decode_naively(query, rope, latent, key, scale, mask):
    """``attend_to_latents`` with every step in the inputs' dtype, softmax in float32 at least, as
    eager attention in transformers.
    """
    scores = scale * (torch.cat([query, rope], -1) @ torch.cat([latent, key], -1)[:, None].mT)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(latent.dtype) @ latent[:, None]


DECODERS = json.loads(Path(__file__).with_name("decoders.json").read_text())


def tiny_decoder(family="llama", **changes):
    """A random model of three layers with four heads."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(DECODERS[family] | changes))
    return AutoModelForCausalLM.from_config(config).eval()


def random_tokens(rows=5, length=12):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(0))
