"""The blocked core as an attention function of transformers: ``attn_implementation=BLOCKWISE``.

Models built with it run ``scaled_dot_product_attention`` where that is exact and lean, and blocks of queries where
transformers has nothing but whole ``[B, H, T, S]`` maps: soft-capped scores (Gemma 2) and sinks that are weights
(gpt-oss). Under ``torch.autocast`` on a CPU, in which layers are trained where the processor has matrix units for
bfloat16, blocks are taken too: torch's own attention does not use those units, and widens to float32 where values are
narrower than keys, as in latent attention.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvfold.attention.blocked import blocked_attention
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
    """transformers' attention function contract, with gradients: the result is ``[B, T, H, Dv]``.

    ``query [B, H, T, D]``, ``key [B, G, S, D]``, ``value [B, G, S, Dv]``; ``attention_mask [1|B, 1|H, T, S]`` is
    boolean (true: visible) or added to the scores; ``s_aux [H]`` are sinks. Raises ValueError for a softcap without a
    mask: Gemma 2's classes say ``is_causal = False`` of a causal model, so only the mask tells.
    """
    if softcap is not None and attention_mask is None:
        raise ValueError("attention_mask is None; a softcap needs a mask, which alone tells what is causal")
    unfused = softcap is not None or s_aux is not None
    in_half = query.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    more = attention_mask is not None or options.get("position_bias") is not None or dropout > 0
    if not unfused and (more or not in_half):
        context, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
        return context, None
    # rotary tables are float32 and widen queries and keys
    if in_half:
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    # a mask says all that there is to hide
    rule = Visibility(causal and attention_mask is None, key.shape[2] - query.shape[2])
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    grouped = torch.unflatten(query, 1, (key.shape[1], -1))
    z = blocked_attention(grouped, key, value, rule, scale, attention_mask, softcap, s_aux)
    return z.flatten(1, 2).transpose(1, 2).contiguous(), None


def _mask(*args: Any, config: Any = None, allow_is_causal_skip: bool = True, **options: Any) -> Tensor | None:
    """The mask of ``scaled_dot_product_attention``, left out where causality says all, but never beside a softcap."""
    # the softcap needs blocks anyway, and only the mask tells them what is causal
    skip = allow_is_causal_skip and getattr(config, "attn_logit_softcapping", None) is None
    mask: Tensor | None = sdpa_mask(*args, config=config, allow_is_causal_skip=skip, **options)
    return mask


AttentionInterface.register(BLOCKWISE, blockwise_attention)
AttentionMaskInterface.register(BLOCKWISE, _mask)
