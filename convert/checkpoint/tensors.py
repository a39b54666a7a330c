"""torch tensors and their bytes: read safetensors files by position, and ``pytorch_model*.bin``
with torch.
"""

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvfold.convert.checkpoint.headers import DTYPES, TensorInfo
from kvfold.convert.checkpoint.members import read_bytes, read_into_buffer
from kvfold.convert.errors import InputError, shorten, summarize_error

TORCH_DTYPES = {
    name: getattr(torch, entry["torch"]) for name, entry in DTYPES.items() if "torch" in entry
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def view_as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as a memoryview of the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def read_tensor_chunks(
    path: Path, info: TensorInfo, elements: int | None
) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in a safetensors file, as flat tensors of at most ``elements``
    each; all at once without ``elements``.
    """
    dtype = TORCH_DTYPES[info.dtype]
    step = info.nbytes if elements is None else elements * dtype.itemsize
    for start in range(info.start, max(info.end, info.start + 1), max(step, 1)):
        buffer = torch.empty(min(step, info.end - start), dtype=torch.uint8)
        read_into_buffer(view_as_bytes(buffer), path, start)
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
        raise InputError(
            f"{where} has {bad} NaN or infinite element{'s' * (bad != 1)}{consequence}; the model"
            " is damaged; download it again"
        )


def cast_floats(chunk: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Cast between floating dtypes. Raises InputError if a finite value becomes infinite."""
    cast = chunk.to(dtype)
    if count_non_finite(cast) and (torch.isinf(cast) & torch.isfinite(chunk)).any():
        largest = chunk[torch.isfinite(chunk)].abs().max().item()
        raise InputError(
            f"tensor {name!r} has magnitudes up to {largest:g}, but {DTYPE_NAMES[dtype]} supports"
            f" at most {torch.finfo(dtype).max:g}; choose bfloat16 or float32 as the stored dtype"
        )
    return cast


def load_pickled_state(path: Path) -> dict[str, torch.Tensor]:
    """Load a pickled state dict with ``weights_only=True``, mapped into memory if possible. Raises
    InputError if the file contains anything but dense tensors by name.
    """
    try:
        # an archive of torch 1.6 or newer can be mapped
        zipped = read_bytes(path, 4) == b"PK\x03\x04"
        if zipped:
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > path.stat().st_size:  # torch.save compresses nothing: not its archive
                raise ValueError(f"an archive that unpacks to {unpacked} bytes, more than it has")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        if not isinstance(state, dict):
            raise ValueError(f"it must map names to tensors, not be a {type(state).__name__}")
        for name, tensor in state.items():
            if not _is_dense_tensor(name, tensor):
                raise ValueError(f"the value of {shorten(name)} is no dense tensor with a name")
    except Exception as error:  # torch lets every kind of error of its readers through
        # torch's own text of an UnpicklingError recommends to allow the execution of code
        reason = "" if isinstance(error, pickle.UnpicklingError) else f": {summarize_error(error)}"
        raise InputError(
            f"{path.name}: not a whole file of plain tensors{reason}; download the file again, or"
            " save the model with save_pretrained"
        ) from None
    return state


def _is_dense_tensor(name: Any, tensor: Any) -> bool:
    """True if this is the name of a dense tensor of a plain dtype, whole in its file."""
    return (
        isinstance(name, str)
        and name.isprintable()  # half of a surrogate pair could not be written
        and isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
        and tensor.dtype in DTYPE_NAMES
        and tensor.nbytes <= tensor.untyped_storage().nbytes()
    )


def read_legacy_header(path: Path, file: str) -> list[TensorInfo]:
    """The tensors of a legacy file. Raises InputError if it contains anything else."""
    tensors = []
    position = 0
    for name, tensor in load_pickled_state(path).items():
        end = position + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        tensors.append(TensorInfo(name, dtype, tuple(tensor.shape), file, position, end))
        position = end
    return tensors
