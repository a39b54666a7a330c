"""The arithmetic of a training step on a CPU: bfloat16 where the processor has matrix units for it.

Weights that the file stores in bfloat16 lose nothing by it; activations are rounded to 8 bits, gradients too, while
the residual stream, its norms and the masters stay float32. Held-out sequences are always judged in float32. Such units
(AMX) multiply about four times as fast as float32, but torch's own attention does not use them: it widens to float32
where values are narrower than keys, as in MLA. So attention is computed here, in blocks of queries.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kvfold.attention.drift.frame import attention_of
from kvfold.attention.drift.recording import name_implementation
from kvfold.attention.drift.softcap import BLOCKWISE
from kvfold.convert.device import has_bfloat16_units

_NAME = "kvfold_bfloat16"
# Forward and backward of 8 x 256 tokens, 9 query heads, CPU ms: MLA of 128 and 64 dims 112 (64), 89 (128), 80 (256);
# MQA of 64 dims 44, 49, 54 (recipes/benchmarks/bench_refine_constants.py --attention)
_BLOCK = 128


def bfloat16_pays(device: torch.device, stored: Iterable[torch.dtype]) -> bool:
    """Whether a step with weights of these ``stored`` dtypes is to be computed in bfloat16."""
    return device.type == "cpu" and has_bfloat16_units() and set(stored) == {torch.bfloat16}


@contextmanager
def bfloat16(layer: nn.Module) -> Iterator[None]:
    """Matrix products in bfloat16, those of ``layer``'s attention too."""
    config = getattr(attention_of(layer), "config", None)
    replaced = getattr(config, "_attn_implementation", None) == BLOCKWISE
    if replaced:
        name_implementation(config, _NAME)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        if replaced:
            name_implementation(config, BLOCKWISE)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: ``blocked_attention`` where nothing but causality is asked for."""
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    others = (attention_mask, options.get("position_bias"), options.get("s_aux"), options.get("softcap"))
    if not causal or options.get("dropout") or any(other is not None for other in others):
        plain: tuple[Tensor, Tensor | None] = AttentionInterface()[BLOCKWISE](
            module, query, key, value, attention_mask, **options
        )
        return plain
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return blocked_attention(query, key, value, scale).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attend)


def blocked_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of ``query [B, H, T, D]`` to ``key [B, G, T, D]``, ``value [B, G, T, Dv]``: ``[B, H, T, Dv]``.

    The query heads of a group go through one product. A block of queries meets no keys behind it.
    """
    (batch, heads, length, _), groups = query.shape, key.shape[1]
    keys, values = key.flatten(0, 1).transpose(1, 2), value.flatten(0, 1)
    grouped = query.reshape(batch * groups, heads // groups, length, -1)
    rounded = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    parts = []
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        rows = grouped[:, :, start:stop].flatten(1, 2)
        ahead = torch.full((stop - start, stop), -torch.inf, dtype=rounded).triu(start + 1).repeat(heads // groups, 1)
        scores = torch.baddbmm(ahead.expand(len(rows), -1, -1), rows, keys[..., :stop], alpha=scale)
        part = torch.bmm(scores.softmax(-1), values[:, :stop])
        parts.append(part.view(batch, heads, stop - start, -1))
    return torch.cat(parts, dim=2)
