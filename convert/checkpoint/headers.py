"""Read the header of a safetensors file: the name, dtype, shape and position of each tensor. Does
not import torch.

Format: the header length in 8 little-endian bytes, a JSON object ``{name: {dtype, shape,
data_offsets}}`` padded with spaces, then the bytes of all tensors without gaps
(https://huggingface.co/docs/safetensors).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kvfold.convert.checkpoint.files import read_bytes
from kvfold.convert.errors import InputError, shorten_repr, summarize_error

# Every dtype the format knows: its bits per element, and torch's name unless it is a quantized one
DTYPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("dtypes.json").read_text())
# torch's spelling of floats
TORCH_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
FLOAT_DTYPES = frozenset(TORCH_NAMES)
_MOST_ELEMENTS = 2**63 - 1  # along one dim of a tensor in torch
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class TensorInfo:
    """The name, dtype and shape of one stored tensor, and where it is stored: bytes ``start`` to
    ``end`` of ``file``, a path relative to the checkpoint's folder.

    For tensors in a legacy pickle or on the hub, the positions only define an order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.end - self.start


def count_tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size in bytes of a tensor with this safetensors ``dtype`` and ``shape``. Dtypes of
    less than a byte per element are rounded up to whole bytes per tensor.
    """
    bits: int = DTYPES[dtype]["bits"]
    return -(-math.prod(shape) * bits // 8)


def read_header(path: Path, file: str) -> list[TensorInfo]:
    """Return one `TensorInfo` for each tensor of the safetensors file at ``path``, in byte order.
    ``file`` is the file's name in them. Raises InputError if the file is not valid safetensors.
    """
    try:
        # The library checks lengths and types, that each tensor has the bytes of its dtype and
        # shape, and that together they fill the file.
        with safe_open(path, framework="numpy"):
            base = read_header_end(path)
        entries = json.loads(
            read_bytes(path, base)[_LENGTH_BYTES:], object_pairs_hook=_build_unique_dict
        )
        entries.pop("__metadata__", None)
        tensors = []
        for name, entry in entries.items():
            if max(entry["shape"], default=0) > _MOST_ELEMENTS:
                raise ValueError(
                    f"tensor {shorten_repr(name)} has shape {shorten_repr(entry['shape'])}, too"
                    " large"
                )
            start, end = (base + offset for offset in entry["data_offsets"])
            shape = tuple(entry["shape"])
            tensors.append(TensorInfo(name, entry["dtype"], shape, file, start, end))
    except (SafetensorError, ValueError) as error:
        raise InputError(
            f"{file}: not a valid safetensors file: {summarize_error(error)}; download the file"
            " again"
        ) from None
    return sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))


def _build_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ValueError if a name occurs twice."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def read_header_end(path: Path) -> int:
    """Return the byte position at which the header of a safetensors file ends and its first tensor
    begins, as stated by the file's first 8 bytes.
    """
    return _LENGTH_BYTES + int.from_bytes(read_bytes(path, _LENGTH_BYTES), "little")
