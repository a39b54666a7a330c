"""A decoding step over a latent cache: the query rows of all heads against one key head, its first part the values.

Shapes: ``query [B, H, T, R]`` (already absorbed), ``query_rope [B, H, T, P]``, ``latent [B, S, R]``, ``key_rope
[B, S, P]``, ``mask [1|B, 1|H, T, S]``, result ``[B, H, T, R]``:

    score_hts = scale * (query_ht . latent_s + query_rope_ht . key_rope_s) + mask_ts
    result_ht = sum_s softmax(score)_hts latent_s

Latent and rotary key are two tensors, as transformers caches them; nothing joins them. On CUDA in half precision a
Triton kernel reads each slot once for all heads (``kernel.py``; ``kernel_takes`` says which calls); elsewhere blocks of
matrix products do. One registered operator, so that a traced graph holds one node. Forward only.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from kvfold.attention.products import fast, mix, row_products

# Scores held at once on a CPU, 2 MB in float32; the time is the same from 2^16 to 2^24
# (recipes/benchmarks/bench_attention.py --budgets).
_SCORES = 1 << 19
_HAS_TRITON = find_spec("triton") is not None
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_KERNEL_RANK, _KERNEL_ROPE = 512, 64  # DeepSeek's sizes; the kernel's tiles are laid out for them


def latent_decode(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """The formula above. ``mask``: bool (true: visible) or floating point (added to the scores)."""
    if mask is not None and mask.dtype == torch.bool and mask.shape[1] > 1:
        mask = as_bias(mask, query.dtype)
    if torch.compiler.is_compiling():
        result: Tensor = _operator(query, query_rope, latent, key_rope, scale, mask)
        return result
    return _decode(query, query_rope, latent, key_rope, scale, mask)  # an operator's call is slow


def kernel_takes(query: Tensor, query_rope: Tensor, mask: Tensor | None) -> bool:
    """Whether the Triton kernel computes this call: CUDA, half precision, one query, ``R <= 512``, ``P <= 64``.

    A mask must be boolean and the same for all heads. Shapes as at the top of this file.
    """
    if not _HAS_TRITON or query.device.type != "cuda" or query.dtype not in _KERNEL_DTYPES or query.shape[2] != 1:
        return False
    if query.shape[-1] > _KERNEL_RANK or query_rope.shape[-1] > _KERNEL_ROPE:
        return False
    return mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1)


@torch.library.custom_op("kvfold::latent_decode", mutates_args=())
def _operator(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    return _decode(query, query_rope, latent, key_rope, scale, mask)


def _decode(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    if kernel_takes(query, query_rope, mask):
        from kvfold.attention.decode.kernel import decode_latent  # imports Triton, which is optional

        return decode_latent(query, query_rope, latent, key_rope, scale, mask=None if mask is None else mask[:, 0, 0])
    if query.device.type != "cpu":
        return latent_rows(query, query_rope, latent, key_rope, mask, scale)[0]
    return _in_blocks(query, query_rope, latent, key_rope, scale, mask)


@_operator.register_fake
def _(query: Tensor, *rest: object) -> Tensor:
    return query.new_empty(query.shape)


def latent_rows(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The formula above at once, and the attention weights ``[B, H, T, S]``; softmax in at least float32."""
    rows, rope = query.flatten(1, 2), query_rope.flatten(1, 2)
    scores = torch.baddbmm(rows @ latent.mT, rope, key_rope.mT, beta=scale, alpha=scale)
    scores = torch.unflatten(scores.to(_wide(scores)), 1, query.shape[1:3])
    if mask is not None:
        scores = scores + as_bias(mask, scores.dtype)
    weights = scores.softmax(-1).to(latent.dtype)
    return torch.unflatten(weights.flatten(1, 2) @ latent, 1, query.shape[1:3]), weights


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers added to the scores: finite, so that a query that sees nothing gives finite results."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min / 2)


def _in_blocks(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    """A few sequences at a time, so that their scores stay in a core's cache."""
    batch, heads, queries, _ = query.shape
    bias = None if mask is None else as_bias(mask, _wide(query)).expand(batch, -1, -1, -1)
    count = max(1, _SCORES // max(1, heads * queries * latent.shape[1]))
    result = query.new_empty(query.shape)
    for first in range(0, batch, count):
        part = slice(first, first + count)
        some = None if bias is None else bias[part]
        result[part] = _block(query[part], query_rope[part], latent[part], key_rope[part], scale, some)
    return result


def _block(
    query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, scale: float, bias: Tensor | None
) -> Tensor:
    rows, rope = fast(query.flatten(1, 2)), fast(query_rope.flatten(1, 2))
    latent, key_rope = fast(latent), fast(key_rope)
    parts = rows.new_empty(2, *rows.shape[:2], latent.shape[1])
    row_products(rows, latent, scale, parts[0])
    row_products(rope, key_rope, scale, parts[1])
    scores = parts[0].to(_wide(query)).add_(parts[1])
    if bias is not None:
        torch.unflatten(scores, 1, query.shape[1:3]).add_(bias)
    torch.softmax(scores, -1, out=scores)
    return mix(scores.to(latent.dtype), latent).view(query.shape)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
