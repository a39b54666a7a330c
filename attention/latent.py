"""Multi-head latent attention (DeepSeek-V2 2024), explicit and absorbed.

Shapes: ``query_nope [B, H, T, Dn]``, ``query_rope [B, H, T, P]``, ``latent [B, S, R + P]`` (the cache: latent ``c`` and
the rotary key that all heads share, side by side), ``up_key [H, Dn, R]``, ``up_value [H, Dv, R]``, result
``[B, H, T, Dv]``. With ``k_rope`` the last ``P`` numbers of a slot,

    score_hts = scale * (q_nope,ht . W_uk,h c_s + q_rope,ht . k_rope,s)
    result_ht = sum_s softmax(score)_hts W_uv,h c_s

Explicit: ``W_uk c`` and ``W_uv c`` are made for all heads and slots, ``S H (Dn + Dv) R`` multiplications a call: right
for prefill and training. Absorbed: ``W_uk`` meets the query and ``W_uv`` the result, attention runs over the cache
itself as one key head of ``R + P`` dims whose values are its own first ``R``: right for decoding. A decoding step on
CUDA in half precision runs in the Triton kernel of ``decode/``, all else in blocks (``blocked.py``).
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from kvfold.attention.absorbed import absorb_query, expand_value
from kvfold.attention.checks import expect_alike, expect_shape
from kvfold.attention.decode.latent import kernel_takes, latent_decode
from kvfold.attention.grouped import attend
from kvfold.attention.mask import Visibility, visibility


def latent_attention(
    query_nope: Tensor,
    query_rope: Tensor,
    latent: Tensor,
    up_key: Tensor,
    up_value: Tensor,
    *,
    absorbed: bool,
    causal: bool = True,
    offset: int | Tensor | None = None,
    window: int | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The formulas above over the slots each query sees (see ``grouped_attention``): ``[B, H, T, Dv]``.

    Queries and the rotary keys in ``latent`` are already rotated. ``scale`` is ``1 / sqrt(Dn + P)`` by default. Raises
    ValueError for shapes, dtypes or devices that do not fit together.
    """
    _check(query_nope, query_rope, latent, up_key, up_value)
    slots = latent.shape[1]
    rule = visibility(query_nope, slots, causal=causal, offset=offset, window=window, starts=starts, lengths=lengths)
    scale = (query_nope.shape[-1] + query_rope.shape[-1]) ** -0.5 if scale is None else scale
    if absorbed:
        return expand_value(_attend_latent(absorb_query(query_nope, up_key), query_rope, latent, rule, scale), up_value)
    key, value = expand_latent(latent, up_key, up_value)
    return attend(torch.cat([query_nope, query_rope], -1), key, value, rule, scale, None)


def _attend_latent(query: Tensor, query_rope: Tensor, latent: Tensor, rule: Visibility, scale: float) -> Tensor:
    """Weighted latents ``z [B, H, T, R]`` of absorbed queries ``[B, H, T, R]``."""
    rank = query.shape[-1]
    if _by_kernel(query, query_rope, latent, rule):
        slots = latent.shape[1]
        seen = None if rule.sees_all(1, slots) else rule.block(0, 1, 0, slots, latent.device)[:, None]
        return latent_decode(query, query_rope, latent[..., :rank], latent[..., rank:], scale, seen)
    keys = latent[:, None]
    return attend(torch.cat([query, query_rope], -1), keys, keys[..., :rank], rule, scale, None)


def _by_kernel(query: Tensor, query_rope: Tensor, latent: Tensor, rule: Visibility) -> bool:
    """Whether the Triton kernel computes this call; it has no gradient and would read the keys outside of a window.

    On a CPU ``latent_decode`` would gain nothing: over a joined cache blocks are as fast in float32 and two to three
    times as fast in bfloat16 (``recipes/benchmarks/bench_attention.py`` measures both).
    """
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, query_rope, latent))
    plain = rule.window is None and not wants_gradient and min(latent.shape) > 0
    return plain and kernel_takes(query, query_rope, None)


def expand_latent(latent: Tensor, up_key: Tensor, up_value: Tensor) -> tuple[Tensor, Tensor]:
    """Every head's keys ``[B, H, S, Dn + P]`` and values ``[B, H, S, Dv]`` of the cached ``latent [B, S, R + P]``."""
    heads, _, rank = up_key.shape
    c, rope = latent[..., :rank], latent[..., rank:]
    nope = torch.unflatten(linear(c, up_key.flatten(0, 1)), -1, (heads, -1)).transpose(1, 2)
    value = torch.unflatten(linear(c, up_value.flatten(0, 1)), -1, (heads, -1)).transpose(1, 2)
    return torch.cat([nope, rope[:, None].expand(-1, heads, -1, -1)], -1), value


def _check(query_nope: Tensor, query_rope: Tensor, latent: Tensor, up_key: Tensor, up_value: Tensor) -> None:
    expect_shape("query_nope", query_nope, "B H T Dn", {})
    batch, heads, queries, nope = query_nope.shape
    expect_shape("query_rope", query_rope, "B H T P", {"B": batch, "H": heads, "T": queries})
    expect_shape("up_key", up_key, "H Dn R", {"H": heads, "Dn": nope})
    rank, rope = up_key.shape[2], query_rope.shape[3]
    expect_shape("up_value", up_value, "H Dv R", {"H": heads, "R": rank})
    expect_shape("latent", latent, "B S R+P", {"B": batch, "R+P": rank + rope})
    others = {"query_rope": query_rope, "latent": latent, "up_key": up_key, "up_value": up_value}
    for name, tensor in others.items():
        expect_alike(name, tensor, "query_nope", query_nope)
