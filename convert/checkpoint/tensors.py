"""torch tensors and their bytes: read safetensors files by position, and ``pytorch_model*.bin``
with torch.
"""

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvfold.convert.checkpoint.headers import TensorInfo
from kvfold.convert.checkpoint.members import check_unicode, open_source, read_into
from kvfold.convert.errors import InputError, shorten, summarize_error

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
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype for a safetensors dtype name."""
    if name not in TORCH_DTYPES:
        raise InputError(f"dtype {name} must be one of {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[name]


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as a memoryview of the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def read_chunks(path: Path, info: TensorInfo, elements: int | None) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in a safetensors file, as flat tensors of at most ``elements``
    each; all at once without ``elements``.
    """
    dtype = torch_dtype(info.dtype)
    step = info.nbytes if elements is None else elements * dtype.itemsize
    with open_source(path) as file:
        for start in range(info.start, max(info.end, info.start + 1), max(step, 1)):
            buffer = torch.empty(min(step, info.end - start), dtype=torch.uint8)
            read_into(tensor_memory(buffer), file, start)
            yield buffer.view(dtype)


def count_non_finite(tensor: torch.Tensor) -> int:
    """The number of NaN and infinite elements. If there are none, this takes a single pass without
    a copy.
    """
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return 0
    extremes = torch.stack(torch.aminmax(tensor))  # both are NaN when any element is
    return 0 if torch.isfinite(extremes).all() else int((~torch.isfinite(tensor)).sum())


def refuse_non_finite(tensor: torch.Tensor, where: str, consequence: str = "") -> None:
    """Raise InputError if ``tensor`` contains NaN or infinity. ``where`` and ``consequence`` appear
    in the message.
    """
    if bad := count_non_finite(tensor):
        found = f"{where} has {bad} NaN or infinite element{'s' * (bad != 1)}{consequence}"
        raise InputError(f"{found}; the model is damaged; download it again")


def cast_chunk(chunk: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Cast between floating dtypes. Raises InputError if a finite value becomes infinite."""
    cast = chunk.to(dtype)
    if count_non_finite(cast) and (torch.isinf(cast) & torch.isfinite(chunk)).any():
        largest = chunk[torch.isfinite(chunk)].abs().max().item()
        limit = f"{DTYPE_NAMES[dtype]} supports at most {torch.finfo(dtype).max:g}"
        found = f"tensor {name!r} has magnitudes up to {largest:g}, but {limit}"
        raise InputError(f"{found}; choose bfloat16 or float32 as the stored dtype")
    return cast


class LegacyFiles:
    """Reads legacy files with ``weights_only=True``, one file at a time and memory-mapped if
    possible.
    """

    def __init__(self) -> None:
        self._path = Path()
        self._state: dict[str, torch.Tensor] = {}

    def chunks(self, path: Path, info: TensorInfo, elements: int | None) -> Iterator[torch.Tensor]:
        """Yield flat views of the mapped file of at most ``elements`` each."""
        if path != self._path:
            self.close()
            self._state = load_state(path)
            self._path = path
        flat = self._state[info.name].detach().reshape(-1)
        return iter(torch.split(flat, elements or max(1, flat.numel())))

    def close(self) -> None:
        self._path = Path()
        self._state = {}


def load_state(path: Path) -> dict[Any, Any]:
    """Load the pickled dict of tensors. Raises ValueError with a one-line reason if the file
    contains anything else.
    """
    try:
        with open_source(path) as file:
            zipped = file.read(4) == b"PK\x03\x04"  # an archive of torch 1.6 or newer can be mapped
        if zipped:
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
                size = path.stat().st_size
            if unpacked > size:  # torch.save compresses nothing: this one would fill the memory
                raise ValueError(f"an archive of {size} bytes that unpacks to {unpacked}")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError:  # torch's own text recommends to allow the execution of code
        raise ValueError(
            "not a whole file of plain tensors: it is damaged, or its pickle has other objects"
        ) from None
    except (
        Exception
    ) as error:  # torch lets every kind of error of its unpickler and of its archive reader through
        raise ValueError(f"not a whole file of plain tensors: {summarize_error(error)}") from None
    if not isinstance(state, dict):
        raise ValueError(f"it must map names to tensors, not be a {type(state).__name__}")
    return state


def read_legacy_header(path: Path, file: str) -> list[TensorInfo]:
    """The tensors of a legacy file. Raises InputError if it contains anything else."""
    tensors = []
    position = 0
    try:
        for name, tensor in load_state(path).items():
            _check_legacy_tensor(name, tensor)
            end = position + tensor.nbytes
            dtype = DTYPE_NAMES[tensor.dtype]
            tensors.append(TensorInfo(name, dtype, tuple(tensor.shape), file, position, end))
            position = end
    except ValueError as error:
        raise InputError(
            f"{file}: {error}; download the file again, or save the model with save_pretrained"
        ) from None
    return tensors


def _check_legacy_tensor(name: Any, tensor: Any) -> None:
    """Raise ValueError unless this is the name of a dense tensor of a plain dtype, whole in its
    file.
    """
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        pair = f"{type(name).__name__} {shorten(name)} to {type(tensor).__name__}"
        raise ValueError(f"it must map names to tensors, not {pair}")
    check_unicode(name)
    dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta
    if not dense or tensor.dtype not in DTYPE_NAMES:
        kind = f"{tensor.layout}, {tensor.dtype}, {tensor.device}"
        raise ValueError(f"tensor {shorten(name)} must be dense and have a plain dtype, not {kind}")
    stored = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.element_size() > stored:
        raise ValueError(
            f"tensor {shorten(name)} has shape {shorten(list(tensor.shape))}, but {stored} bytes"
        )
