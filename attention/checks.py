"""Argument checks. Each function raises ValueError with the argument's value and the rule that it
violates.
"""

from collections.abc import Mapping

from torch import Tensor


def expect_shape(name: str, tensor: Tensor, dims: str, sizes: Mapping[str, int]) -> None:
    """Check the shape of ``tensor``: ``dims`` names its dims (``"B G S D"``), ``sizes`` gives some
    of their sizes.
    """
    names = dims.split()
    shape = list(tensor.shape)
    wrong = {
        dim: sizes[dim]
        for dim, size in zip(names, shape, strict=False)
        if sizes.get(dim, size) != size
    }
    if len(shape) != len(names) or wrong:
        rule = "".join(f", {dim} = {size}" for dim, size in wrong.items())
        raise ValueError(f"{name} has shape {shape}; it must be [{', '.join(names)}]{rule}")


def expect_divides(name: str, divisor: int, total_name: str, total: int) -> None:
    """Check that ``divisor`` is positive and divides ``total``."""
    if divisor < 1 or total % divisor:
        raise ValueError(f"{name} = {divisor} must divide {total_name} = {total}")


def expect_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}")


def expect_dtype_and_device(
    name: str,
    tensor: Tensor,
    other_name: str,
    other: Tensor,
    *,
    dtype: bool = True,
) -> None:
    """Check that both tensors are on the same device and, if ``dtype`` is true, have the same
    dtype.
    """
    if dtype and tensor.dtype != other.dtype:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}; it must be {other.dtype}, the dtype of {other_name}"
        )
    if tensor.device != other.device:
        raise ValueError(
            f"{name} is on {tensor.device}; it must be on {other.device}, like {other_name}"
        )
