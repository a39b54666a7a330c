"""The header of a safetensors file, parsed and checked without torch.

Format: 8 bytes little-endian header length, a JSON object ``{name: {dtype, shape, data_offsets}}`` padded with spaces,
then the tensors' bytes without gaps (https://huggingface.co/docs/safetensors).
"""

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvfold.convert.checkpoint.json_text import load_json
from kvfold.convert.errors import first_line, short

# Bits per element of every dtype the format knows.
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
TORCH_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}  # torch's spelling of floats
FLOAT_DTYPES = frozenset(TORCH_NAMES)
MAX_HEADER = 100_000_000  # what the reference implementation accepts
_LARGEST = 2**63 - 1  # no tensor has more elements, and no file more bytes
PREFIX = 8


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor. ``start`` and ``end`` are absolute byte positions in ``file`` (a name relative to the folder).

    ``made`` is ``dequantized`` or ``cast`` if the tensor differs from the stored bytes. For such tensors, and in a
    legacy pickle, the positions only give the order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int
    made: str = ""

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass
class Header:
    """The header of one file: its tensors in the order of their bytes, the problems found, a digest of the header."""

    tensors: list[TensorInfo] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    digest: str = ""


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; sub-byte dtypes round up."""
    return -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)


def parse_header(file: str, size: int, read: Callable[[int, int], bytes]) -> Header:
    """Check the header of ``file`` (``size`` bytes long), fetching bytes through ``read(start, length)``."""
    if size < PREFIX:
        return Header(problems=[f"{file}: truncated: expected at least {PREFIX} bytes, found {size}; fetch it again"])
    (length,) = struct.unpack("<Q", read(0, PREFIX))
    if length > MAX_HEADER:
        text = f"{file}: expected a safetensors header of at most {MAX_HEADER} bytes, found a length of {length}"
        return Header(problems=[f"{text}; not a safetensors file, or damaged: fetch it again"])
    if PREFIX + length > size:
        text = f"{file}: truncated inside its header: expected {PREFIX + length} bytes or more, found {size}"
        return Header(problems=[f"{text}; fetch it again"])
    raw = read(PREFIX, length)
    try:
        entries = load_json(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        return Header(problems=[f"{file}: expected a JSON header, found {first_line(error)}; fetch it again"])
    if not raw.startswith(b"{") or not isinstance(entries, dict):
        return Header(problems=[f"{file}: expected the header to be a JSON object; fetch it again"])
    header = _check_entries(file, entries, PREFIX + length, size)
    header.digest = hashlib.sha256(raw).hexdigest()
    return header


def _check_entries(file: str, entries: dict[str, Any], base: int, size: int) -> Header:
    header = Header()
    for name, entry in entries.items():
        if name == "__metadata__":
            texts = isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values())
            if not texts and entry is not None:  # null is what the safetensors library takes for no metadata
                header.problems.append(f"{file}: expected __metadata__ to map names to strings, found {short(entry)}")
            continue
        problem = _entry_problem(entry)
        if problem:
            header.problems.append(f"{file}: tensor {short(name)}: {problem}")
            continue
        start, end = (base + offset for offset in entry["data_offsets"])
        header.tensors.append(TensorInfo(name, entry["dtype"], tuple(entry["shape"]), file, start, end))
    header.tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    # an entry that was refused above would look like a gap
    if not header.problems:
        header.problems.extend(_layout_problems(file, header.tensors, base, size))
    return header


def _entry_problem(entry: Any) -> str:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "expected exactly dtype, shape and data_offsets in its header entry"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"unknown dtype {short(dtype)}; expected one of {', '.join(DTYPE_BITS)}"
    if not _counts(shape):
        return f"expected a shape of whole numbers, found {short(shape)}"
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"expected data_offsets [begin, end] with begin <= end, found {short(offsets)}"
    if not _possible(shape) or offsets[1] > _LARGEST:
        return f"expected fewer than 2**63 elements and bytes, found shape {short(shape)}, offsets {short(offsets)}"
    needed, found = tensor_bytes(dtype, tuple(shape)), offsets[1] - offsets[0]
    if needed != found:
        return f"dtype {dtype} and shape {short(shape)} need {needed} bytes, its data_offsets span {found}"
    return ""


def _layout_problems(file: str, tensors: list[TensorInfo], base: int, size: int) -> list[str]:
    """The bytes must be used from the header's end to the file's, each exactly once."""
    problems, position = [], base
    for tensor in tensors:
        if tensor.start != position:
            fault = "overlaps the tensor before it" if tensor.start < position else "leaves a gap before it"
            positions = f"expected to start at byte {position}, found {tensor.start}"
            problems.append(f"{file}: tensor {short(tensor.name)} {fault}: {positions}")
        position = max(position, tensor.end)
    if position > size:
        problems.append(f"{file}: truncated: expected {position} bytes, found {size}; fetch it again")
    elif position < size:
        problems.append(f"{file}: expected {position} bytes, found {size}: {size - position} belong to no tensor")
    return problems


def _counts(value: Any) -> bool:
    """True if a JSON value is a list of non-negative whole numbers."""
    # not isinstance: JSON's true would pass for 1
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _possible(shape: list[int]) -> bool:
    """True if a tensor can have this shape."""
    elements = 1
    # stops multiplying early: the product of a hostile header's numbers could take minutes
    for size in () if 0 in shape else shape:
        elements *= size
        if elements > _LARGEST:
            return False
    return all(size <= _LARGEST for size in shape)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, _ in pairs if counts[name] > 1)
        raise ValueError(f"the name {short(twice)} twice")
    return result
