"""A Triton kernel for one decoding step over a latent cache.

Shapes: ``query [B, H, 1, R]``, ``query_rope [B, H, 1, P]``, ``latent [B, S, R]``, ``key_rope [B, S,
P]``, ``mask [1|B, S]`` (bool), result ``[B, H, 1, R]``.

The slots of each sequence are split into parts (Dao et al. 2023, "Flash-Decoding"): one program
handles up to 64 heads of one sequence and one part of its slots. It loads each latent once and uses
it both as the key and as the value of all these heads; online softmax keeps ``max``, ``sum`` and
the weighted latents in float32. A second kernel merges the parts by their log-sum-exp. With more
than 64 heads, several programs read the same slots. Loops without masks for whole tiles, and TMA
descriptors, were tried on an H200: faster with 64 heads or more, slower with 32 and 16, so left
out.
"""

# ruff: noqa: ANN001, ANN202 -- a kernel's annotations are Triton's: they mark what is constant when
# it is compiled

import math
import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
# slots of a part: chosen, not measured on a GPU, so that a part reads far more than the sums it
# leaves for the merge
_FEWEST_SLOTS = 256
# stages of a program's loads
_STAGES = 2
# channels of a merging program: chosen, not measured on a GPU; several programs then share the
# ranks in use
_MERGED = 128


def choose_tile(heads: int, rank: int, rope: int, size: int, shared: float) -> tuple[int, int, int]:
    """Return how many heads and cache slots a GPU program handles at once, and its number of warps,
    for ``heads`` query heads and slots of ``rank + rope`` channels of ``size`` bytes.

    ``shared`` is the most shared memory of a program in bytes; at least 16 slots are taken. For a
    rank of 512 the sizes were chosen by timing on an H200; others were not measured.
    """
    # Tensor cores take at least 16 rows. The float32 sums are in registers: those of 32 heads of
    # rank 512 take half of what 4 warps have, those of 64 half of what 8 have.
    rows = max(16, min(64, int(triton.next_power_of_2(heads))))
    warps = 8 if rows * rank > 32 * 512 else 4
    # Shared memory keeps the queries, the slots and their weights, as Triton 3.9 compiles tiles for
    # Hopper; for other cards that is at least what they take. Hopper's products of 64 rows read
    # every stage from it, others one less.
    buffers = _STAGES if rows == 64 else _STAGES - 1
    slots = 64
    while slots > 16:
        channels = (rows + buffers * slots) * (rank + rope) + rows * slots
        if channels * size <= shared:
            break
        slots //= 2
    return rows, slots, warps


@cache
def _read_max_shared_memory(card: int) -> int:
    """Return the maximum shared memory of a GPU program in bytes, for GPU number ``card``."""
    return int(triton.runtime.driver.active.utils.get_device_properties(card)["max_shared_mem"])


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _attend_to_part_kernel(  # type: ignore[no-untyped-def]  # its annotations are Triton's
    query,
    query_rope,
    latent,
    key_rope,
    mask,
    z,
    log_sums,
    scale,
    heads,
    slots,
    split_slots,
    splits,
    c_b,
    c_s,
    k_b,
    k_s,
    R: tl.constexpr,
    P: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Triton kernel: attend from some heads of a sequence to one part of its cache slots. Stores
    the part's weighted mean of the latents and log2-sum-exp2 of its scores.
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(2)
    r = tl.arange(0, RANK)
    p = tl.arange(0, ROPE)
    head_mask = h < heads
    first = split * split_slots
    end = tl.minimum(slots, first + split_slots)

    q = tl.load(
        query + (b * heads + h)[:, None] * R + r[None, :],
        mask=head_mask[:, None] & (r < R)[None, :],
        other=0.0,
    )
    qr = tl.load(
        query_rope + (b * heads + h)[:, None] * P + p[None, :],
        mask=head_mask[:, None] & (p < P)[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
        qr = qr.to(tl.float32)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, RANK], tl.float32)
    for start in range(first, end, SLOTS):
        s = start + tl.arange(0, SLOTS)
        slot_mask = s < end
        s = s.to(tl.int64)
        c = tl.load(
            latent + b * c_b + s[:, None] * c_s + r[None, :],
            mask=slot_mask[:, None] & (r < R)[None, :],
            other=0.0,
        )
        k = tl.load(
            key_rope + b * k_b + s[:, None] * k_s + p[None, :],
            mask=slot_mask[:, None] & (p < P)[None, :],
            other=0.0,
        )
        kind = c.dtype
        if WIDEN:
            c = c.to(tl.float32)
            k = k.to(tl.float32)
        score = tl.dot(q, tl.trans(c))
        score = tl.dot(qr, tl.trans(k), score) * scale
        seen = slot_mask
        if HAS_MASK:
            seen = seen & (tl.load(mask + b * slots + s, mask=slot_mask, other=0) != 0)
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        # a part that sees nothing yet has no maximum: exp2(-inf - -inf) would be NaN
        level = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - level)
        weight = tl.exp2(score - level[:, None])
        total = total * fade + tl.sum(weight, 1)
        acc = tl.dot(weight.to(kind).to(c.dtype), c, acc * fade[:, None])
        top = higher

    # heads of a sequence that sees nothing divide by one and stay zero
    divisor = tl.where(total > 0, total, 1.0)
    index = (b * heads + h) * splits + split
    tl.store(
        z + index[:, None] * R + r[None, :],
        acc / divisor[:, None],
        mask=head_mask[:, None] & (r < R)[None, :],
    )
    tl.store(
        log_sums + index,
        tl.where(total > 0, top + tl.log2(divisor), float("-inf")),
        mask=head_mask,
    )


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _merge_parts_kernel(  # type: ignore[no-untyped-def]  # its annotations are Triton's
    z,
    log_sums,
    result,
    splits,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Triton kernel: merge the results for the parts of one sequence's cache, weighted by their
    log2-sum-exp2, for one head and some channels.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SPLITS)
    r = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sums = tl.load(log_sums + row * splits + n, mask=n < splits, other=float("-inf"))
    top = tl.max(sums, 0)
    level = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(sums - level)
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total > 0, total, 1.0)
    partial = tl.load(
        z + (row * splits + n[:, None]) * R + r[None, :],
        mask=(n < splits)[:, None] & (r < R)[None, :],
        other=0.0,
    )
    merged = tl.sum(partial * weight[:, None], 0)
    tl.store(result + row * R + r, merged.to(result.dtype.element_ty), mask=r < R)


def run_latent_kernel(
    query: Tensor,
    query_rope: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Return ``softmax(scale * (query . latent + query_rope . key_rope)) latent`` over the visible
    cache slots, ``[B, H, 1, R]``, by Triton kernels.

    Sequences see the slots where ``mask`` is True; a sequence that sees no slot gets zeros.
    ``splits`` is the number of parts per sequence, by default enough to keep the device busy.
    """
    batch, heads, _, rank = query.shape
    slots = latent.shape[1]
    rope = query_rope.shape[-1]
    query = query.contiguous()
    query_rope = query_rope.contiguous()
    # parts of the cache stay where they are
    latent, key_rope = (
        tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (latent, key_rope)
    )
    # Tensor cores take at least 16 channels.
    rank_width, rope_width = (max(16, int(triton.next_power_of_2(width))) for width in (rank, rope))
    on_gpu = query.device.type == "cuda"
    shared = math.inf
    busy = 1
    if on_gpu:
        shared = _read_max_shared_memory(query.device.index)
        # two waves of programs, one per multiprocessor at a time
        busy = 2 * torch.cuda.get_device_properties(query.device).multi_processor_count
    size = query.element_size()
    tile_heads, tile_slots, warps = choose_tile(heads, rank_width, rope_width, size, shared)
    blocks = triton.cdiv(heads, tile_heads)
    splits = splits or min(
        triton.cdiv(busy, batch * blocks), max(1, triton.cdiv(slots, _FEWEST_SLOTS))
    )
    split_slots = triton.cdiv(triton.cdiv(slots, splits), tile_slots) * tile_slots
    splits = max(1, triton.cdiv(slots, split_slots))
    z = torch.empty(batch, heads, splits, rank, dtype=torch.float32, device=query.device)
    log_sums = torch.empty(batch, heads, splits, dtype=torch.float32, device=query.device)
    seen = None if mask is None else mask.expand(batch, -1).contiguous().view(torch.uint8)
    # Triton's interpreter treats bfloat16 numbers as their integer bits
    widen = os.environ.get("TRITON_INTERPRET") == "1" and query.dtype == torch.bfloat16
    result = torch.empty(batch, heads, 1, rank, dtype=query.dtype, device=query.device)
    # merging reads little: several programs share a head so that none of them waits
    channels = min(_MERGED, rank_width)
    # Triton launches on the current device, wherever its arguments are
    with torch.cuda.device(query.get_device()):  # -1, which changes nothing, on a CPU
        _attend_to_part_kernel[(batch, blocks, splits)](
            query,
            query_rope,
            latent,
            key_rope,
            seen,
            z,
            log_sums,
            scale * _LOG2_E,
            heads,
            slots,
            split_slots,
            splits,
            *latent.stride()[:2],
            *key_rope.stride()[:2],
            R=rank,
            P=rope,
            RANK=rank_width,
            ROPE=rope_width,
            HEADS=tile_heads,
            SLOTS=tile_slots,
            HAS_MASK=mask is not None,
            WIDEN=widen,
            num_warps=warps,
            num_stages=_STAGES,
        )
        _merge_parts_kernel[(batch * heads, triton.cdiv(rank, channels))](
            z,
            log_sums,
            result,
            splits,
            R=rank,
            SPLITS=triton.next_power_of_2(splits),
            CHANNELS=channels,
        )
    return result
