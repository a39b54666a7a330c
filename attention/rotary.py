"""Rotary position embedding (Su et al. 2021, "RoFormer").

Pair ``l`` of a vector at position ``t`` is a complex number, rotated by the angle ``t * theta_l``. A pair is stored as
``(x[l], x[l + Dr / 2])`` in the half-split layout (GPT-NeoX, Llama) and as ``(x[2 l], x[2 l + 1])`` in the interleaved
one (the paper, GPT-J, DeepSeek). Only the first ``Dr = 2 * len(theta)`` dims are rotated, the rest pass unchanged.
Angles are computed in float64 and applied in at least float32, so that a long context costs no precision.
"""

from typing import Literal

import torch
from torch import Tensor

from kvfold.attention.checks import expect_alike, expect_at_least, expect_shape

Layout = Literal["half", "interleaved"]


def rotary_frequencies(dims: int, base: float = 10000.0) -> Tensor:
    """``theta_l = base^(-2 l / dims)``, ``l = 0 .. dims / 2 - 1``, radians per position: float64 ``[dims / 2]``."""
    if dims % 2:
        raise ValueError(f"dims = {dims} must be even: rotary dims come in pairs")
    return base ** (torch.arange(0, dims, 2, dtype=torch.float64) / -dims)


def rotary_tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``positions [T]`` or ``[B, T]`` times ``frequencies [Dr / 2]``: ``[1|B, T, Dr / 2]``.

    Positions may be any integers or reals: shifted, repeated, interpolated.
    """
    if positions.dim() not in (1, 2):
        raise ValueError(f"positions have shape {list(positions.shape)}; they must be [T] or [B, T]")
    expect_shape("frequencies", frequencies, "Dr/2", {})
    expect_alike("positions", positions, "frequencies", frequencies, dtype=False)
    # Apple GPUs have no float64
    wide = torch.float32 if frequencies.device.type == "mps" else torch.float64
    angles = positions.to(wide)[..., None] * frequencies.to(wide)
    angles = angles if angles.dim() == 3 else angles[None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor], layout: Layout = "half") -> Tensor:
    """Rotate the first ``Dr`` dims of ``x [B, H, T, D]`` by ``rotary_tables``; same shape and dtype."""
    cos, sin = tables
    rotary = 2 * cos.shape[-1]
    if layout not in ("half", "interleaved"):
        raise ValueError(f"layout = {layout!r} must be 'half' or 'interleaved'")
    expect_shape("x", x, "B H T D", {})
    expect_alike("x", x, "tables", cos, dtype=False)
    expect_at_least("head dim D of x", x.shape[-1], rotary)
    if cos.shape[1] != x.shape[2] or cos.shape[0] not in (1, x.shape[0]):
        raise ValueError(
            f"tables have B = {cos.shape[0]} and T = {cos.shape[1]}; x needs B = {x.shape[0]} or 1 and T = {x.shape[2]}"
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos[:, None].to(wide), sin[:, None].to(wide)  # [1|B, 1, T, Dr / 2]
    # at 100,000 tokens a rotation in bfloat16 would lose the position
    moving = x[..., :rotary].to(wide)
    if layout == "half":
        real, imaginary = moving.chunk(2, -1)
        result = torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)
    else:
        real, imaginary = moving[..., ::2], moving[..., 1::2]
        result = torch.stack([real * cos - imaginary * sin, imaginary * cos + real * sin], -1).flatten(-2)
    result = result.to(x.dtype)
    return result if rotary == x.shape[-1] else torch.cat([result, x[..., rotary:]], -1)
