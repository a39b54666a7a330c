"""Checks of arguments: each raises ValueError with the argument, what was expected and what was found."""

from collections.abc import Mapping

import torch
from torch import Tensor


def expect_shape(name: str, tensor: Tensor, dims: str, sizes: Mapping[str, int]) -> None:
    """``dims`` spells the dims in order (``"B G S D"``); those named in ``sizes`` must have that size."""
    names = dims.split()
    shape = list(tensor.shape)
    if len(shape) != len(names):
        raise ValueError(f"{name}: expected {len(names)} dims [{', '.join(names)}], found shape {shape}")
    wrong = [dim for dim, size in zip(names, shape, strict=True) if sizes.get(dim, size) != size]
    if wrong:
        expected = ", ".join(f"{dim} = {sizes[dim]}" for dim in wrong)
        raise ValueError(f"{name}: expected shape [{', '.join(names)}] with {expected}, found {shape}")


def expect_divides(name: str, part: int, total_name: str, total: int) -> None:
    """``part`` must be positive and divide ``total``."""
    if part < 1 or total % part:
        raise ValueError(f"{name}: expected a number that divides {total_name} = {total}, found {part}")


def expect_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, found {value}")


def expect_alike(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Same dtype and same device."""
    if tensor.dtype != other.dtype:
        raise ValueError(f"{name}: expected dtype {other.dtype} as in {other_name}, found {tensor.dtype}")
    expect_device(name, tensor, other_name, other)


def expect_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name}: expected device {other.device} as in {other_name}, found {tensor.device}")


def expect_counts(name: str, counts: Tensor | None, batch: int, like_name: str, like: Tensor) -> None:
    """One integer per sequence, or ``None``."""
    if counts is None:
        return
    expect_shape(name, counts, "B", {"B": batch})
    if counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: expected dtype torch.int64 or torch.int32, found {counts.dtype}")
    expect_device(name, counts, like_name, like)
