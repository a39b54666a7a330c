"""Rotary position embedding (Su et al. 2021, "RoFormer").

Pair ``l`` of a vector at position ``t`` is treated as a complex number and rotated by the angle ``t
* theta_l``. A pair is stored as ``(x[l], x[l + Dr / 2])`` in the half-split layout (GPT-NeoX,
Llama) and as ``(x[2 l], x[2 l + 1])`` in the interleaved layout (the paper, GPT-J, DeepSeek). Only
the first ``Dr = 2 * len(theta)`` dims are rotated; the rest pass through unchanged. Angles are
computed in float64 and applied in float32 or wider, so long contexts lose no precision.
"""

from typing import Literal

import torch
from torch import Tensor

from kvfold.attention.checks import expect_dtype_and_device, expect_shape

RotaryLayout = Literal["half", "interleaved"]


def rotary_frequencies(dims: int, base: float = 10000.0) -> Tensor:
    """Return ``theta_l = base^(-2 l / dims)`` in radians per position, ``l = 0 .. dims / 2 - 1``:
    ``[dims / 2]``, float64.
    """
    if dims % 2:
        raise ValueError(f"dims is {dims}; it must be even, because rotary dims come in pairs")
    return base ** (torch.arange(0, dims, 2, dtype=torch.float64) / -dims)


def rotary_tables(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of ``positions [T]`` or ``[B, T]`` times ``frequencies [Dr /
    2]``, each ``[1|B, T, Dr / 2]``.

    Positions may be any integers or real numbers, including shifted, repeated or interpolated
    positions.
    """
    expect_dtype_and_device("positions", positions, "frequencies", frequencies, dtype=False)
    # Apple GPUs have no float64
    wide = torch.float32 if frequencies.device.type == "mps" else torch.float64
    angles = positions.to(wide)[..., None] * frequencies.to(wide)
    angles = angles if angles.dim() == 3 else angles[None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor], layout: RotaryLayout = "half") -> Tensor:
    """Return ``x [B, H, T, D]`` with its first ``Dr`` dims rotated by the cosines and sines from
    ``rotary_tables``.
    """
    cos, sin = tables
    rotary = 2 * cos.shape[-1]
    if layout not in ("half", "interleaved"):
        raise ValueError(f"layout is {layout!r}; it must be 'half' or 'interleaved'")
    expect_dtype_and_device("x", x, "tables", cos, dtype=False)
    expect_shape("tables", cos, "B T Dr/2", {"T": x.shape[2]})
    wide = torch.promote_types(x.dtype, torch.float32)
    # [1|B, 1, T, Dr / 2]
    cos = cos[:, None].to(wide)
    sin = sin[:, None].to(wide)
    # at 100,000 tokens a rotation in bfloat16 would lose the position
    moving = x[..., :rotary].to(wide)
    if layout == "half":
        real, imaginary = moving.chunk(2, -1)
    else:
        real, imaginary = torch.unflatten(moving, -1, (-1, 2)).unbind(-1)
    pairs = [real * cos - imaginary * sin, imaginary * cos + real * sin]
    rotated = torch.cat(pairs, -1) if layout == "half" else torch.stack(pairs, -1).flatten(-2)
    return torch.cat([rotated.to(x.dtype), x[..., rotary:]], -1)
