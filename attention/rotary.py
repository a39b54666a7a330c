"""Rotary position embedding (Su et al. 2021, "RoFormer").

Pair ``l`` of a vector at position ``t`` is a complex number, rotated by the angle ``t * theta_l``. A pair is stored as
``(x[l], x[l + Dr / 2])`` in the half-split layout (GPT-NeoX, Llama) and as ``(x[2 l], x[2 l + 1])`` in the interleaved
one (the paper, GPT-J, DeepSeek). Only the first ``Dr = 2 * len(theta)`` dims are rotated, the rest pass unchanged.
Angles are computed in float64 and applied in at least float32, so that a long context costs no precision.
"""

from typing import Literal

import torch
from torch import Tensor

from kvfold.attention.checks import expect_at_least, expect_device

Layout = Literal["half", "interleaved"]


def rotary_frequencies(dims: int, base: float = 10000.0) -> Tensor:
    """``theta_l = base^(-2 l / dims)``, ``l = 0 .. dims / 2 - 1``, radians per position: float64 ``[dims / 2]``."""
    if dims % 2:
        raise ValueError(f"dims: expected an even number of rotary dims, found {dims}")
    return base ** (torch.arange(0, dims, 2, dtype=torch.float64) / -dims)


def rotary_tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``positions [T]`` or ``[B, T]`` times ``frequencies [Dr / 2]``: ``[1|B, T, Dr / 2]``.

    Positions may be any integers or reals: shifted, repeated, interpolated.
    """
    if positions.dim() not in (1, 2):
        raise ValueError(f"positions: expected [T] or [B, T], found shape {list(positions.shape)}")
    if frequencies.dim() != 1:
        raise ValueError(f"frequencies: expected [Dr / 2], found shape {list(frequencies.shape)}")
    expect_device("positions", positions, "frequencies", frequencies)
    # Apple GPUs have no float64
    wide = torch.float32 if frequencies.device.type == "mps" else torch.float64
    angles = positions.to(wide)[..., None] * frequencies.to(wide)
    angles = angles if angles.dim() == 3 else angles[None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor], layout: Layout = "half") -> Tensor:
    """Rotate the first ``Dr`` dims of ``x [B, H, T, D]`` by ``rotary_tables``; same shape and dtype."""
    cos, sin = tables
    rotary = _check(x, cos, layout)
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


def _check(x: Tensor, cos: Tensor, layout: str) -> int:
    """The number of rotary dims ``Dr``."""
    if layout not in ("half", "interleaved"):
        raise ValueError(f"layout: expected 'half' or 'interleaved', found {layout!r}")
    if x.dim() != 4:
        raise ValueError(f"x: expected 4 dims [B, H, T, D], found shape {list(x.shape)}")
    expect_device("x", x, "tables", cos)
    batch, rotary = cos.shape[0], 2 * cos.shape[-1]
    expect_at_least("x: head dim D", x.shape[-1], rotary)
    if cos.shape[1] != x.shape[2] or batch not in (1, x.shape[0]):
        shape = f"positions for B = {x.shape[0]} (or 1) and T = {x.shape[2]}"
        raise ValueError(f"tables: expected {shape}, found B = {batch} and T = {cos.shape[1]}")
    return rotary
