"""Attention that torch has no function for, a block of queries at a time, as an attention function of transformers.

That is soft-capped scores (Gemma 2) and sinks that are weights (gpt-oss), for which transformers makes whole
``[B, H, T, T]`` maps. Models built with ``attn_implementation=BLOCKWISE`` run ``scaled_dot_product_attention`` where
they have neither, and ``blockwise_attention`` otherwise.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

BLOCKWISE = "kvfold_blockwise"
_QUERY_BLOCK = 256


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``softmax(softcap * tanh(scale q k^T / softcap)) v`` -> ``[B, T, H, Dv]``, a block of queries at a time.

    ``query [B, H, T, D]``, ``key [B, G, S, D]``, ``value [B, G, S, Dv]``; ``mask [B or 1, 1, T, S]`` is True where a
    query sees a key. ``sinks [H]``: the score of one more key, whose value is zero.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    length = query.shape[2]
    output = torch.empty(*query.shape[:3], value.shape[-1], dtype=query.dtype, device=query.device)
    wide = torch.promote_types(query.dtype, torch.float32)
    for start in range(0, length, _QUERY_BLOCK):
        rows = slice(start, min(start + _QUERY_BLOCK, length))
        scores = query[:, :, rows] @ key.transpose(2, 3) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask[:, :, rows], float("-inf")).to(wide)
        weights = torch.softmax(scores, dim=-1) if sinks is None else softmax_beside(scores, sinks[:, None, None])
        output[:, :, rows] = weights.to(query.dtype) @ value
    return output.transpose(1, 2).contiguous()


def softmax_beside(scores: Tensor, sink: Tensor) -> Tensor:
    """The softmax of ``scores [..., S]`` and one more score ``sink [..., 1]``, without the latter's weight."""
    sink = sink.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function contract: the result is ``[B, T, H, Dv]``; ``s_aux [H]`` are sinks."""
    if softcap is None and s_aux is None:
        context, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
        return context, None
    if softcap is not None and attention_mask is None:
        raise ValueError("attention_mask: expected a mask beside a softcap, found none")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = _causal_mask(query, key) if attention_mask is None else attention_mask
    return blockwise_attention(query, key, value, mask, scale, softcap, s_aux), None


def _causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """``[1, 1, T, S]``: the last ``T`` of ``S`` positions see those up to themselves."""
    length, total = query.shape[2], key.shape[2]
    return torch.ones(length, total, dtype=torch.bool, device=query.device).tril(total - length)[None, None]


def _mask(*args: Any, config: Any = None, allow_is_causal_skip: bool = True, **options: Any) -> Tensor | None:
    """The mask of ``scaled_dot_product_attention``, which is left out where causality says all; never beside a softcap.

    Gemma 2's classes say ``is_causal = False`` of a model with ``use_bidirectional_attention`` and mask it causally
    nevertheless: only the mask tells.
    """
    skip = allow_is_causal_skip and getattr(config, "attn_logit_softcapping", None) is None
    mask: Tensor | None = sdpa_mask(*args, config=config, allow_is_causal_skip=skip, **options)
    return mask


AttentionInterface.register(BLOCKWISE, _attention)
AttentionMaskInterface.register(BLOCKWISE, _mask)
