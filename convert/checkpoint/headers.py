"""Parse and check the header of a safetensors file, without torch.

Format: the header length in 8 little-endian bytes, a JSON object ``{name: {dtype, shape,
data_offsets}}`` padded with spaces, then the bytes of all tensors without gaps
(https://huggingface.co/docs/safetensors).
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.members import load_json, raise_problems, read_bytes
from kvfold.convert.errors import InputError, shorten, summarize_error

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


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The size of a tensor in bytes; for sub-byte dtypes, it is rounded up to whole bytes."""
    return -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)


def read_header(path: Path, file: str) -> list[TensorInfo]:
    """The tensors of a local safetensors file, in byte order. Raises InputError with all its
    problems.
    """
    return parse_header(file, path.stat().st_size, partial(read_bytes, path))


def parse_header(file: str, size: int, read: Callable[[int, int], bytes]) -> list[TensorInfo]:
    """The tensors of ``file``, which has ``size`` bytes, in byte order. ``read(start, length)``
    returns its bytes. Raises InputError with all its problems.
    """
    try:
        if size < LENGTH_BYTES:
            raise ValueError(f"it has {size} bytes, but a header takes at least {LENGTH_BYTES}")
        length = int.from_bytes(read(0, LENGTH_BYTES), "little")
        most = min(MAX_HEADER, size - LENGTH_BYTES)
        if length > most:
            raise ValueError(f"its header would take {length} bytes, but at most {most} can be")
        raw = read(LENGTH_BYTES, length)
        entries = load_json(raw, object_pairs_hook=_refuse_duplicates)
        if not raw.startswith(b"{"):
            raise ValueError("its header must be a JSON object")
        # null is what the safetensors library takes for no metadata
        metadata = entries.pop("__metadata__", None)
        if metadata is not None and not (
            isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
        ):
            raise ValueError(f"__metadata__ must map names to strings, but is {shorten(metadata)}")
    except (ValueError, RecursionError) as error:
        problem = f"{file}: not a valid safetensors file: {summarize_error(error)}"
        raise InputError(f"{problem}; download the file again") from None
    base = LENGTH_BYTES + length
    tensors = []
    problems = []
    for name, entry in entries.items():
        if problem := _entry_problem(entry):
            problems.append(f"{file}: tensor {shorten(name)}: {problem}; download the file again")
        else:
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            tensors.append(TensorInfo(name, entry["dtype"], shape, file, base + start, base + end))
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    # an entry that was refused above would look like a gap
    raise_problems(problems)
    raise_problems(_layout_problems(file, tensors, base, size))
    return tensors


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
            type(item) is int and 0 <= item <= _LARGEST for item in value
        ):
            return f"{key} {shorten(value)} must be a list of integers from 0 to 2**63 - 1"
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {shorten(offsets)} must be [begin, end] with begin <= end"
    # multiplied one by one, up to the limit: the product of a hostile header's numbers could take
    # minutes
    if any(count > _LARGEST for count in accumulate([0] if 0 in shape else shape, mul)):
        return f"shape {shorten(shape)} must have fewer than 2**63 elements"
    needed = tensor_bytes(dtype, tuple(shape))
    size = offsets[1] - offsets[0]
    if needed != size:
        return (
            f"dtype {dtype} and shape {shorten(shape)} need {needed} bytes, but data_offsets span"
            f" {size}"
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
            problems.append(
                f"{file}: tensor {shorten(tensor.name)} starts at byte {tensor.start}, but the one"
                f" before it ends at {position}; download the file again"
            )
        position = max(position, tensor.end)
    if position != size:
        problems.append(
            f"{file}: its tensors end at byte {position}, but it has {size} bytes; download the"
            " file again"
        )
    return problems


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"its header contains the name {shorten(name)} twice")
    return result
