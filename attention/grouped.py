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

from kvfold.attention.blocked import blocked_attention
from kvfold.attention.checks import expect_alike, expect_divides, expect_shape
from kvfold.attention.mask import Visibility, visibility

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
    offset: int | Tensor | None = None,
    window: int | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """``softmax(scale * query key^T + bias) value`` over the keys that each query sees: ``[B, H, T,
    Dv]``.

    With ``causal``, query ``t`` sees the keys up to its own position ``offset + t``, counted in key
    slots; ``offset`` is an integer or a tensor ``[B]``, by default ``S - T``. ``window`` limits
    this to the last ``window`` keys (without ``causal``, to keys less than ``window`` slots away on
    either side). ``starts [B]`` and ``lengths [B]`` limit the keys of sequence ``b`` to slots
    ``starts[b] .. lengths[b] - 1``; the other slots are padding. A query that sees no key gets
    zeros. ``bias [1|B, 1|H, T, S]`` is added to the scores. ``scale`` is ``1 / sqrt(D)`` by
    default.

    Raises ValueError for incompatible shapes, head counts, dtypes or devices.
    """
    _check(query, key, value, bias)
    keys = key.shape[2]
    rule = visibility(
        query,
        keys,
        causal=causal,
        offset=offset,
        window=window,
        starts=starts,
        lengths=lengths,
    )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attend(query, key, value, rule, scale, bias)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Visibility,
    scale: float,
    bias: Tensor | None,
) -> Tensor:
    """``grouped_attention`` for checked arguments, with the mask arguments combined in ``rule``."""
    batch, heads, queries, _ = query.shape
    # bounds in tensors would have to be read from the device
    if not rule.ragged and isinstance(rule.offset, int):
        # keys that no query sees are cut off first: a windowed decoding step then sees all that is
        # left
        low, high = rule.key_range(0, queries, key.shape[2])
        if high - low < key.shape[2]:
            key = key[:, :, low:high]
            value = value[:, :, low:high]
            rule = replace(rule, offset=rule.offset - low)
            bias = None if bias is None else bias[..., low:high]
    groups, keys = key.shape[1:3]
    grouped = torch.unflatten(query, 1, (groups, heads // groups))
    # in half precision on a CPU the fused kernel loses to blocks of matrix products at any length
    on_cpu = query.device.type == "cpu"
    fused = (
        bias is None
        and key.shape[-1] == value.shape[-1]
        and min(batch, queries) > 0
        and keys > _FEW_KEYS
        and not (on_cpu and query.dtype in (torch.bfloat16, torch.float16))
    )
    if fused and rule.sees_all(queries, keys):
        # query heads of a group become rows of one key head, which is then read once for all of
        # them
        z = scaled_dot_product_attention(grouped.flatten(2, 3), key, value, scale=scale)
        return torch.unflatten(z, 2, (-1, queries)).flatten(1, 2)
    triangle = rule.causal and not rule.ragged and rule.offset == 0 and queries == keys
    if fused and triangle and (rule.window is None or rule.window >= keys):
        result: Tensor = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scale,
            enable_gqa=heads != groups,
        )
        return result
    return blocked_attention(grouped, key, value, rule, scale, bias).flatten(1, 2)


def _check(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
    expect_shape("query", query, "B H T D", {})
    batch, heads, queries, width = query.shape
    expect_shape("key", key, "B G S D", {"B": batch, "D": width})
    groups, keys = key.shape[1:3]
    expect_shape("value", value, "B G S Dv", {"B": batch, "G": groups, "S": keys})
    expect_divides("the number of key heads G", groups, "the number of query heads H", heads)
    expect_alike("key", key, "query", query)
    expect_alike("value", value, "query", query)
    if bias is not None:
        expect_shape("bias", bias, "1|B 1|H T S", {"T": queries, "S": keys})
        if bias.shape[0] not in (1, batch) or bias.shape[1] not in (1, heads):
            raise ValueError(
                f"bias has shape {list(bias.shape)}; it must be [1|{batch}, 1|{heads}, T, S]"
            )
        expect_alike("bias", bias, "query", query, dtype=False)
