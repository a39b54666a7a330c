"""Between torch tensors and bytes in files. Of this package only this module and ``legacy`` import torch."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from kvfold.convert.checkpoint.file_bytes import open_source
from kvfold.convert.checkpoint.headers import TensorInfo
from kvfold.convert.errors import InputError, KvfoldError

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name."""
    if name not in TORCH_DTYPES:
        raise KvfoldError(f"dtype {name}: expected one of {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype."""
    if dtype not in _NAMES:
        raise KvfoldError(f"dtype {dtype}: expected one of {', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def read_tensor(path: Path, info: TensorInfo) -> torch.Tensor:
    """Read a whole tensor by position."""
    with open_source(path) as file:
        return read_elements(file.fileno(), info, info.start, info.end).reshape(info.shape)


def read_chunks(path: Path, info: TensorInfo, elements: int) -> Iterator[torch.Tensor]:
    """A tensor's elements in order, flat, at most ``elements`` at a time."""
    step = elements * torch_dtype(info.dtype).itemsize
    with open_source(path) as file:
        for start in range(info.start, info.end, step):
            yield read_elements(file.fileno(), info, start, min(start + step, info.end))


def read_elements(file: int, info: TensorInfo, start: int, end: int) -> torch.Tensor:
    """The elements of ``info`` that lie in bytes ``start`` .. ``end`` of the open file, flat, owning their memory."""
    buffer = torch.empty(end - start, dtype=torch.uint8)
    view, position = tensor_memory(buffer), 0
    while position < len(view):
        count = os.preadv(file, [view[position : position + (1 << 30)]], start + position)
        if count == 0:
            raise InputError(f"{info.file}: expected {info.end} bytes, found the end of the file: it changed meanwhile")
        position += count
    return buffer.view(torch_dtype(info.dtype))


def count_non_finite(tensor: torch.Tensor) -> int:
    """The number of elements that are NaN or infinite. For a sound tensor this costs one pass without a copy."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return 0
    extremes = torch.stack(torch.aminmax(tensor))  # both are NaN when any element is
    return 0 if torch.isfinite(extremes).all() else int((~torch.isfinite(tensor)).sum())


def refuse_non_finite(tensor: torch.Tensor, where: str, consequence: str = "") -> None:
    """Raises InputError when a weight holds NaN or infinity; ``where`` names it, ``consequence`` is what follows."""
    if bad := count_non_finite(tensor):
        raise InputError(
            f"{where}: expected finite numbers, found {bad} NaN or infinite{consequence}; "
            "such a model is damaged: fetch it again"
        )


def cast_chunk(chunk: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Cast between floating dtypes; InputError when a finite value becomes infinite."""
    cast = chunk.to(dtype)
    if count_non_finite(cast) and (torch.isinf(cast) & torch.isfinite(chunk)).any():
        largest = chunk[torch.isfinite(chunk)].abs().max().item()
        limit = f"{torch.finfo(dtype).max:g}"
        raise InputError(
            f"tensor {name!r}: expected values up to {limit} to store it as {dtype_name(dtype)}, found {largest:g}; "
            "choose bfloat16 or float32 as the stored dtype"
        )
    return cast
