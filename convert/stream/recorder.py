"""An attention function for stock models that computes what theirs would and can show what it was given.

transformers hands its attention functions queries and keys after projection, norm and rotary embedding, for every
family alike. Registered under the name ``kvfold_recorder``, this one notes them for whoever asked (``recording``) and
goes on to ``scaled_dot_product_attention``, or to a blockwise soft-capped attention for families that cap their scores
(gemma2).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "kvfold_recorder"
_QUERY_BLOCK = 256


@dataclass
class AttentionCall:
    """What the last attention call was given, ``query [B, H, T, D]`` and ``key [B, G, S, D]`` after norms and rotary
    embedding, and what it made: ``mixed [B, T, H, Dv]``, the weighted values of each head."""

    query: Tensor | None = None
    key: Tensor | None = None
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None
    mixed: Tensor | None = None


_asked: ContextVar[AttentionCall | None] = ContextVar("kvfold_attention_call", default=None)


@contextmanager
def recording() -> Iterator[AttentionCall]:
    """Within, attention calls of models built with ``ATTENTION`` leave their arguments in the yielded object."""
    call = AttentionCall()
    token = _asked.set(call)
    try:
        yield call
    finally:
        _asked.reset(token)


def recording_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function contract: the result is ``[B, T, H, D]``."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None:
        mixed, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scale, **kwargs)
    else:
        mixed = capped_attention(query, key, value, attention_mask, scale, softcap)
    call = _asked.get()
    if call is not None:
        call.query, call.key, call.mixed = query, key, mixed
        call.scale, call.window, call.softcap = scale, kwargs.get("sliding_window"), softcap
    return mixed, None


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """``softmax(softcap * tanh(scale q k^T / softcap)) v`` -> ``[B, T, H, D]``, causal; a block of queries at a time.

    ``mask [B or 1, 1, T, S]`` is True where a query may look; None means causal with the last query at the last key.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    queries, keys = query.shape[2], key.shape[2]
    output = torch.empty(*query.shape[:3], value.shape[-1], dtype=query.dtype, device=query.device)
    wide = torch.promote_types(query.dtype, torch.float32)
    for start in range(0, queries, _QUERY_BLOCK):
        rows = slice(start, min(start + _QUERY_BLOCK, queries))
        seen = _causal_rows(rows, queries, keys, query.device) if mask is None else mask[:, :, rows]
        scores = softcap * torch.tanh(query[:, :, rows] @ key.transpose(2, 3) * (scale / softcap))
        scores = scores.masked_fill(~seen, float("-inf"))
        output[:, :, rows] = torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype) @ value
    return output.transpose(1, 2).contiguous()


def _causal_rows(rows: slice, queries: int, keys: int, device: torch.device) -> Tensor:
    position = torch.arange(rows.start, rows.stop, device=device) + keys - queries
    return torch.arange(keys, device=device) <= position[:, None]


AttentionInterface.register(ATTENTION, recording_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
