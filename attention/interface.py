"""The blocked attention core as a transformers attention function:
``attn_implementation=BLOCKWISE``.

Models loaded with it use ``scaled_dot_product_attention`` where that is exact and memory-efficient.
They use blocks of queries where transformers could only build whole ``[B, H, T, S]`` maps: for
soft-capped scores (Gemma 2) and learned sinks (gpt-oss). On a CPU they also use blocks where values
are narrower than keys, as in latent attention, for which torch has no fused kernel (at dims of 128
and 64 blocks take 0.4 of the time), and under ``torch.autocast``, used for training on processors
with bfloat16 matrix units, which torch's own attention does not use.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvfold.attention.blocked import AttentionScores, blocked_attention
from kvfold.attention.mask import Visibility

BLOCKWISE = "kvfold_blockwise"


def blockwise_attention(
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
    """Attention function for transformers, with gradients, that avoids whole score matrices.
    Returns the output ``[B, T, H, Dv]`` and None.

    ``query [B, H, T, D]``, ``key [B, G, S, D]``, ``value [B, G, S, Dv]``; ``attention_mask [1|B,
    1|H, T, S]`` is boolean (True means visible) or is added to the scores; ``s_aux [H]`` contains
    the sinks. Raises ValueError for a softcap without a mask: Gemma 2's classes set ``is_causal =
    False`` although the model is causal, so only the mask is reliable.
    """
    if softcap is not None and attention_mask is None:
        raise ValueError(
            "attention_mask is None; models with a softcap do not set is_causal reliably, so pass a"
            " mask"
        )
    on_cpu = query.device.type == "cpu"
    autocast = on_cpu and torch.is_autocast_enabled("cpu")
    slow = autocast or (on_cpu and value.shape[-1] < query.shape[-1])
    plain = attention_mask is None and options.get("position_bias") is None and not dropout
    if softcap is None and s_aux is None and not (slow and plain):
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return result
    # rotary tables are float32 and widen queries and keys
    if autocast:
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    # a mask already includes causality and windows
    rule = Visibility(causal and attention_mask is None, key.shape[2] - query.shape[2])
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    grouped = torch.unflatten(query, 1, (key.shape[1], -1))
    scores = AttentionScores((grouped,), (key,), scale, rule, attention_mask, softcap, s_aux)
    z = blocked_attention(scores, value)
    return z.flatten(1, 2).transpose(1, 2).contiguous(), None


def _make_mask(
    *args: Any,
    config: Any = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """Return the mask for ``scaled_dot_product_attention``, or None if the attention is causal
    without a softcap, which needs no mask.
    """
    # the softcap needs blocks anyway, and only the mask tells them what is causal
    skip = allow_is_causal_skip and getattr(config, "attn_logit_softcapping", None) is None
    mask: Tensor | None = sdpa_mask(*args, config=config, allow_is_causal_skip=skip, **options)
    return mask


AttentionInterface.register(BLOCKWISE, blockwise_attention)
AttentionMaskInterface.register(BLOCKWISE, _make_mask)
