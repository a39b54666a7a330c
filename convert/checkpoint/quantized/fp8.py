"""FP8 weights with a scale per block (DeepSeek-V3, Qwen3-FP8), per output channel or per tensor."""

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.quantized.format import Format, Infos, Read, Shape

if TYPE_CHECKING:
    from torch import Tensor, dtype

_SCALES = (".weight_scale_inv", ".weight_scale")
_DROPS = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".kv_scale", ".input_scale_ub")
_ELEMENTS = 1 << 22  # dequantized at a time: about 60 MB of temporary memory


def fp8_formats(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    """The formats of ``quant_method`` fp8 and fbgemm_fp8. Raises ValueError for settings that are none of theirs."""
    block = settings.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        raise ValueError(f"expected weight_block_size [rows, columns], found {block!r}")
    label = "FP8" if block is None else f"FP8 in blocks of {block[0]} x {block[1]}"
    blocks = None if block is None else (block[0], block[1])
    return tuple(
        Format(
            label=label,
            root=".weight",
            dtypes=frozenset({"F8_E4M3", "F8_E5M2"}),
            needs=(scale,),
            takes=(),
            drops=_DROPS,
            shape=partial(_shape, scale, blocks),
            dequantize=partial(_dequantize, scale, blocks),
            library=("transformers.integrations.finegrained_fp8", "transformers>=5.23"),
            keeps=partial(_whole, blocks),
        )
        for scale in _SCALES
    )


def _shape(scale: str, block: tuple[int, int] | None, infos: Infos, read: Read) -> Shape:
    shape, scales = infos[".weight"].shape, infos[scale].shape
    if len(shape) != 2:
        raise ValueError(f"expected a matrix, found {list(shape)}")
    _block(shape, scales, block)
    return shape


def _whole(block: tuple[int, int] | None, infos: Infos) -> bool:
    """Whether a weight consists of whole blocks: transformers 5.23 takes their size from the number of scales."""
    weight = infos[".weight"]
    whole = block is not None and not any(size % side for size, side in zip(weight.shape, block, strict=True))
    return whole and weight.dtype == "F8_E4M3" and ".weight_scale_inv" in infos


def _block(shape: Shape, scales: Shape, block: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns that share a scale; a row where all do. Raises ValueError when the scales fit no blocks."""
    if prod(scales) == 1:
        return 1, shape[1]
    rows, columns = (1, shape[1]) if block is None else block
    expected = (-(-shape[0] // rows), -(-shape[1] // columns))
    if tuple(size for size in scales if size != 1) != tuple(size for size in expected if size != 1):
        raise ValueError(f"expected scales {list(expected)} for a weight {list(shape)}, found {list(scales)}")
    return rows, columns


def _dequantize(
    scale: str, block: tuple[int, int] | None, parts: "Mapping[str, Tensor]", shape: Shape, dtype: "dtype"
) -> "Tensor":
    """The weight in ``dtype``, some rows of blocks at a time.

    transformers takes the size of a block from the number of scales, which is another size where the last block is cut:
    the weight is filled up with zeros to whole blocks before it is dequantized.
    """
    import torch
    from torch.nn.functional import pad
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, scales = parts[".weight"], parts[scale]
    rows, columns = _block(shape, tuple(scales.shape), block)
    grid = (-(-shape[0] // rows), -(-shape[1] // columns))
    scales = scales.reshape(1, 1).expand(grid) if scales.numel() == 1 else scales.reshape(grid)
    if scales.dtype != torch.uint8:  # bytes of exponents are transformers' to decode
        scales = scales.float()
    dense, operation = torch.empty(shape, dtype=dtype), Fp8Dequantize(None)
    at_once = max(1, _ELEMENTS // (rows * shape[1]))  # rows of blocks
    for first in range(0, grid[0], at_once):
        some = weight[first * rows : (first + at_once) * rows]
        missing = (0, -shape[1] % columns, 0, -len(some) % rows)
        whole = pad(some.view(torch.uint8), missing).view(weight.dtype)  # 0 is the byte of 0.0
        made = operation.convert({"weight": whole, "weight_scale_inv": scales[first : first + at_once]})["weight"]
        dense[first * rows : first * rows + len(some)] = made[: len(some), : shape[1]]
    return dense
