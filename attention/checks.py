"""Argument checks. Each function raises ValueError with the argument's value and the rule that it
violates.
"""

from collections.abc import Mapping

from torch import Tensor


def expect_shape(name: str, tensor: Tensor, dims: str, sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless ``tensor`` has the dims named in ``dims`` (such as ``"B G S D"``) and
    those in ``sizes`` have the given sizes.
    """
    names = dims.split()
    shape = list(tensor.shape)
    wrong = {
        dim: sizes[dim]
        for dim, size in zip(names, shape, strict=False)
        if sizes.get(dim, size) != size
    }
    if len(shape) != len(names) or wrong:
        expected_sizes = "".join(f", {dim} = {size}" for dim, size in wrong.items())
        raise ValueError(
            f"{name} has shape {shape}; it must be [{', '.join(names)}]{expected_sizes}"
        )


def expect_groups(groups: int, heads: int) -> None:
    """Raise ValueError unless ``groups`` key heads can serve ``heads`` query heads."""
    if groups < 1 or heads % groups:
        raise ValueError(
            f"the number of key heads G = {groups} must divide the number of query heads H ="
            f" {heads}"
        )


def expect_positive(name: str, value: int) -> None:
    """Raise ValueError if ``value`` is below 1."""
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")


def expect_dtype_and_device(
    name: str,
    tensor: Tensor,
    other_name: str,
    other: Tensor,
    *,
    dtype: bool = True,
) -> None:
    """Raise ValueError unless ``tensor`` is on the device of ``other`` and, if ``dtype`` is true,
    has its dtype.
    """
    if dtype and tensor.dtype != other.dtype:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}; it must be {other.dtype}, the dtype of {other_name}"
        )
    if tensor.device != other.device:
        raise ValueError(
            f"{name} is on {tensor.device}; it must be on {other.device}, like {other_name}"
        )
