"""Attention with soft-capped scores (Gemma 2) a block of queries at a time, as an attention function of transformers.

transformers computes such scores with whole ``[B, H, T, T]`` maps. Models built with ``attn_implementation=BLOCKWISE``
run ``scaled_dot_product_attention`` where scores are not capped and ``capped_attention`` where they are.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

BLOCKWISE = "kvfold_blockwise"
_QUERY_BLOCK = 256


def capped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """``softmax(softcap * tanh(scale q k^T / softcap)) v`` -> ``[B, T, H, Dv]``, a block of queries at a time.

    ``query [B, H, T, D]``, ``key [B, G, S, D]``, ``value [B, G, S, Dv]``; ``mask [B or 1, 1, T, S]`` is True where a
    query sees a key.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    length = query.shape[2]
    output = torch.empty(*query.shape[:3], value.shape[-1], dtype=query.dtype, device=query.device)
    wide = torch.promote_types(query.dtype, torch.float32)
    for start in range(0, length, _QUERY_BLOCK):
        rows = slice(start, min(start + _QUERY_BLOCK, length))
        scores = softcap * torch.tanh(query[:, :, rows] @ key.transpose(2, 3) * (scale / softcap))
        scores = scores.masked_fill(~mask[:, :, rows], float("-inf"))
        output[:, :, rows] = torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype) @ value
    return output.transpose(1, 2).contiguous()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function contract: the result is ``[B, T, H, Dv]``."""
    if softcap is None:
        context, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
        return context, None
    if attention_mask is None:
        raise ValueError("attention_mask: expected a mask beside a softcap, found none")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return capped_attention(query, key, value, attention_mask, scale, softcap), None


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
