"""MXFP4 experts of gpt-oss: 4-bit floats in blocks of 32 that share an exponent."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.quantized.format import Format, Infos, Read, Shape

if TYPE_CHECKING:
    from torch import Tensor, dtype


def mxfp4_formats(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    """``NAME_blocks`` and ``NAME_scales`` of the experts, all of a layer in one tensor ``NAME``."""
    return (
        Format(
            label="MXFP4",
            root="_blocks",
            dtypes=frozenset({"U8"}),
            needs=("_scales",),
            takes=(),
            drops=(),
            shape=_shape,
            dequantize=_dequantize,
            library=("transformers.integrations.mxfp4", "transformers>=5.23"),
            dense="",
            keeps=lambda infos: True,
        ),
    )


def _shape(infos: Infos, read: Read) -> Shape:
    """``blocks [experts, out, groups, bytes]`` hold two numbers a byte; the dense tensor is ``[experts, in, out]``."""
    blocks, scales = infos["_blocks"].shape, infos["_scales"].shape
    if len(blocks) != 4 or scales != blocks[:-1]:
        raise ValueError(f"expected blocks [experts, out, groups, bytes] and scales without the last, found {scales}")
    experts, out, groups, size = blocks
    return experts, 2 * groups * size, out


def _dequantize(parts: "Mapping[str, Tensor]", shape: Shape, dtype: "dtype") -> "Tensor":
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    made: Tensor = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=dtype)
    return made.reshape(shape)
