"""Checks of arguments: each raises ValueError with the argument's value and the rule that it must obey."""

from collections.abc import Mapping

import torch
from torch import Tensor


def expect_shape(name: str, tensor: Tensor, dims: str, sizes: Mapping[str, int]) -> None:
    """``dims`` spells the dims in order (``"B G S D"``); those named in ``sizes`` must have that size."""
    names = dims.split()
    shape = list(tensor.shape)
    wrong = {dim: sizes[dim] for dim, size in zip(names, shape, strict=False) if sizes.get(dim, size) != size}
    if len(shape) != len(names) or wrong:
        rule = " with " + ", ".join(f"{dim} = {size}" for dim, size in wrong.items()) if wrong else ""
        raise ValueError(f"{name} has shape {shape}; it must be [{', '.join(names)}]{rule}")


def expect_divides(name: str, part: int, total_name: str, total: int) -> None:
    """``part`` must be positive and divide ``total``."""
    if part < 1 or total % part:
        raise ValueError(f"{name} = {part} must divide {total_name} = {total}")


def expect_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} = {value} must be at least {least}")


def expect_alike(name: str, tensor: Tensor, other_name: str, other: Tensor, *, dtype: bool = True) -> None:
    """Same device, and same dtype unless ``dtype`` is false."""
    if dtype and tensor.dtype != other.dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {other.dtype}, as in {other_name}")
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {other.device}, as {other_name} is")


def expect_counts(name: str, counts: Tensor | None, batch: int, like_name: str, like: Tensor) -> None:
    """One integer per sequence, or ``None``."""
    if counts is None:
        return
    expect_shape(name, counts, "B", {"B": batch})
    if counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} has dtype {counts.dtype}; it must be torch.int64 or torch.int32")
    expect_alike(name, counts, like_name, like, dtype=False)
