"""Multi-head, multi-query and grouped-query attention, using the fastest exact kernel for each
call.

Shapes: ``query [B, H, T, D]``, ``key [B, G, S, D]``, ``value [B, G, S, Dv]``, result ``[B, H, T,
Dv]``. Query head ``h`` uses key head ``h // (H / G)``: ``G = H`` is multi-head, ``G = 1``
multi-query attention (Vaswani et al. 2017; Shazeer 2019; Ainslie et al. 2023). No kernel creates a
``T x S`` matrix for scores or mask; README.md lists the kernel used for each kind of call.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvfold.attention.blocked import AttentionScores, blocked_attention
from kvfold.attention.checks import expect_dtype_and_device, expect_groups, expect_shape
from kvfold.attention.mask import Visibility, check_mask_arguments

# Gradients over very few keys are differences of nearly equal numbers, which torch's kernel rounds
# apart: over a single key its gradient is not zero. Blocks keep them exact. The limit is chosen,
# not measured: cheap in blocks anyway.
_FEW_KEYS = 16


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    offset: int | None = None,
    window: int | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return ``softmax(scale * query key^T) value`` over the keys that each query sees: ``[B, H, T,
    Dv]``.

    With ``causal``, query ``t`` sees the keys up to its own position ``offset + t``, counted in key
    slots; ``offset`` is ``S - T`` by default. ``window`` limits this to the last ``window`` keys.
    Slots of sequence ``b`` before ``starts[b]`` and from ``lengths[b]`` on are padding, which no
    query sees. A query that sees no key gets zeros. ``scale`` is ``1 / sqrt(D)`` by default.

    Raises ValueError for incompatible shapes, head counts, dtypes or devices.
    """
    expect_shape("query", query, "B H T D", {})
    batch, heads, _, width = query.shape
    expect_shape("key", key, "B G S D", {"B": batch, "D": width})
    groups, keys = key.shape[1:3]
    expect_shape("value", value, "B G S Dv", {"B": batch, "G": groups, "S": keys})
    expect_groups(groups, heads)
    expect_dtype_and_device("key", key, "query", query)
    expect_dtype_and_device("value", value, "query", query)
    rule = check_mask_arguments(query, keys, causal, offset, window, starts, lengths)
    return apply_grouped_attention(query, key, value, rule, width**-0.5 if scale is None else scale)


def apply_grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Visibility,
    scale: float,
) -> Tensor:
    """Return attention output ``[B, H, T, Dv]`` for arguments that are already checked; ``rule``
    says which keys each query sees.
    """
    batch, heads, queries, _ = query.shape
    if not rule.padded:
        # keys that no query sees are cut off first: a windowed decoding step then sees all that is
        # left
        low, high = rule.find_key_range(0, queries, key.shape[2])
        key = key[:, :, low:high]
        value = value[:, :, low:high]
        rule = replace(rule, offset=rule.offset - low)
    groups, keys = key.shape[1:3]
    grouped = torch.unflatten(query, 1, (groups, heads // groups))
    # in half precision on a CPU the fused kernel loses to blocks of matrix products at any length
    on_cpu = query.device.type == "cpu"
    fused = (
        key.shape[-1] == value.shape[-1]
        and min(batch, queries) > 0
        and keys > _FEW_KEYS
        and not (on_cpu and query.dtype in (torch.bfloat16, torch.float16))
    )
    if fused and rule.sees_all(queries, keys):
        # query heads of a group become rows of one key head, which is then read once for all of
        # them
        z = scaled_dot_product_attention(grouped.flatten(2, 3), key, value, scale=scale)
        return torch.unflatten(z, 2, (-1, queries)).flatten(1, 2)
    triangle = rule.causal and not rule.padded and rule.offset == 0 and queries == keys
    if fused and triangle and (rule.window is None or rule.window >= keys):
        shared = heads != groups
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=shared
        )
    scores = AttentionScores((grouped,), (key,), scale, rule)
    return blocked_attention(scores, value).flatten(1, 2)
