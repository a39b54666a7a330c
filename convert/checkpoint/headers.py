"""Parse and check the header of a safetensors file, without torch.

Format: the header length in 8 little-endian bytes, a JSON object ``{name: {dtype, shape,
data_offsets}}`` padded with spaces, then the bytes of all tensors without gaps
(https://huggingface.co/docs/safetensors).
"""

import math
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.members import load_json, read_bytes
from kvfold.convert.errors import shorten, summarize_error

# Bits per element of every dtype the format knows
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
TORCH_NAMES = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}  # torch's spelling of floats
FLOAT_DTYPES = frozenset(TORCH_NAMES)
MAX_HEADER = 100_000_000  # what the reference implementation accepts
_LARGEST = 2**63 - 1  # no tensor has more elements, and no file more bytes
LENGTH_BYTES = 8


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor. ``start`` and ``end`` are byte positions in ``file``, whose name is
    relative to the folder.

    For tensors in a legacy pickle, the positions only define an order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass
class Header:
    """The header of one file: its tensors in byte order, and the problems found."""

    tensors: list[TensorInfo] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The size of a tensor in bytes; for sub-byte dtypes, it is rounded up to whole bytes."""
    return -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)


def read_header(path: Path, file: str) -> Header:
    """Read the header of a local safetensors file. Raises InputError if the file cannot be read."""
    return parse_header(file, path.stat().st_size, partial(read_bytes, path))


def parse_header(file: str, size: int, read: Callable[[int, int], bytes]) -> Header:
    """Parse and check the header of ``file``, which has ``size`` bytes. ``read(start, length)``
    returns its bytes.
    """
    try:
        if size < LENGTH_BYTES:
            raise ValueError(
                f"truncated to {size} bytes, but a header takes at least {LENGTH_BYTES}"
            )
        (length,) = struct.unpack("<Q", read(0, LENGTH_BYTES))
        if length > MAX_HEADER:
            raise ValueError(
                f"its header would take {length} bytes, but at most {MAX_HEADER} are allowed"
            )
        if LENGTH_BYTES + length > size:
            raise ValueError(
                f"truncated to {size} bytes, but its header alone takes {LENGTH_BYTES + length}"
            )
        raw = read(LENGTH_BYTES, length)
        entries = load_json(raw, object_pairs_hook=_unique)
        if not raw.startswith(b"{"):
            raise ValueError("its header must be a JSON object")
    except (ValueError, RecursionError) as error:
        return Header(
            problems=[
                f"{file}: not a valid safetensors file: {summarize_error(error)};"
                " download the file again"
            ]
        )
    header = Header()
    metadata = entries.pop(
        "__metadata__", None
    )  # null is what the safetensors library takes for no metadata
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        header.problems.append(
            f"{file}: __metadata__ must map names to strings, but is {shorten(metadata)}; download"
            " the file again"
        )
    for name, entry in entries.items():
        if problem := _entry_problem(entry):
            header.problems.append(
                f"{file}: tensor {shorten(name)}: {problem}; download the file again"
            )
            continue
        start, end = (LENGTH_BYTES + length + offset for offset in entry["data_offsets"])
        header.tensors.append(
            TensorInfo(name, entry["dtype"], tuple(entry["shape"]), file, start, end)
        )
    header.tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    # an entry that was refused above would look like a gap
    if not header.problems:
        header.problems = _layout_problems(file, header.tensors, LENGTH_BYTES + length, size)
    return header


def _entry_problem(entry: Any) -> str:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "its header entry must contain exactly dtype, shape and data_offsets"
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"dtype {shorten(dtype)} must be one of {', '.join(DTYPE_BITS)}"
    for key, value in (("shape", shape), ("data_offsets", offsets)):
        # not isinstance: JSON's true would pass for 1
        if not isinstance(value, list) or not all(
            type(item) is int and item >= 0 for item in value
        ):
            return f"{key} {shorten(value)} must be a list of non-negative integers"
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {shorten(offsets)} must be [begin, end] with begin <= end"
    # multiplied one by one, up to the limit: the product of a hostile header's numbers could take
    # minutes
    counts = accumulate([0] if 0 in shape else shape, mul)
    if max([*shape, *offsets]) > _LARGEST or any(count > _LARGEST for count in counts):
        return (
            f"shape {shorten(shape)} and data_offsets {shorten(offsets)} must stay below 2**63"
            " elements and bytes"
        )
    needed = tensor_bytes(dtype, tuple(shape))
    found = offsets[1] - offsets[0]
    if needed != found:
        return (
            f"dtype {dtype} and shape {shorten(shape)} need {needed} bytes, but data_offsets span"
            f" {found}"
        )
    return ""


def _layout_problems(file: str, tensors: list[TensorInfo], base: int, size: int) -> list[str]:
    """List the bytes between the header's end and the file's end that are not used by exactly one
    tensor.
    """
    problems = []
    position = base
    for tensor in tensors:
        if tensor.start != position:
            fault = (
                "overlaps the tensor before it"
                if tensor.start < position
                else "leaves a gap before it"
            )
            place = f"it starts at byte {tensor.start}, but must start at {position}"
            problems.append(
                f"{file}: tensor {shorten(tensor.name)} {fault}: {place}; download the file again"
            )
        position = max(position, tensor.end)
    if position > size:
        problems.append(f"{file}: truncated to {size} of {position} bytes; download the file again")
    elif position < size:
        problems.append(
            f"{file}: no tensor uses the last {size - position} of {size} bytes; download the file"
            " again"
        )
    return problems


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, _ in pairs if counts[name] > 1)
        raise ValueError(f"its header contains the name {shorten(twice)} twice")
    return result
