"""Read torch tensors from legacy files ``pytorch_model*.bin`` by torch.load; check and cast the
values of tensors.
"""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from kvfold.convert.checkpoint.files import read_bytes
from kvfold.convert.checkpoint.headers import DTYPES, TensorInfo
from kvfold.convert.errors import InputError, shorten_repr, summarize_error

TORCH_DTYPES = {
    name: getattr(torch, entry["torch"]) for name, entry in DTYPES.items() if "torch" in entry
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def view_as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a memoryview that shares its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def count_non_finite(tensor: torch.Tensor) -> int:
    """Return the number of NaN and infinite elements of ``tensor``. A tensor without any is checked
    in one pass, without a copy.
    """
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return 0
    extremes = torch.stack(torch.aminmax(tensor))  # both are NaN when any element is
    return 0 if torch.isfinite(extremes).all() else int((~torch.isfinite(tensor)).sum())


def refuse_non_finite(tensor: torch.Tensor, where: str, consequence: str = "") -> None:
    """Raise InputError if ``tensor`` contains NaN or infinity. The message begins with ``where``
    (which tensor) and ends with ``consequence``.
    """
    if bad_count := count_non_finite(tensor):
        raise InputError(
            f"{where} has {bad_count} NaN or infinite element{'s' * (bad_count != 1)}{consequence};"
            " the model is damaged; download it again"
        )


def cast_floats(chunk: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Cast ``chunk``, a part of the tensor ``name``, to another floating-point dtype. Raises
    InputError if a finite value becomes infinite.
    """
    cast = chunk.to(dtype)
    if count_non_finite(cast) and (torch.isinf(cast) & torch.isfinite(chunk)).any():
        largest = chunk[torch.isfinite(chunk)].abs().max().item()
        raise InputError(
            f"tensor {name!r} has magnitudes up to {largest:g}, but {DTYPE_NAMES[dtype]} supports"
            f" at most {torch.finfo(dtype).max:g}; use --dtype bfloat16 or --dtype float32"
        )
    return cast


def load_pickled_state(path: Path) -> dict[str, torch.Tensor]:
    """Load a state dict from a legacy file ``pytorch_model*.bin`` with ``weights_only=True``,
    memory-mapped if possible. Raises InputError if the file contains anything but named dense
    tensors.
    """
    try:
        # an archive of torch 1.6 or newer can be mapped
        zipped = read_bytes(path, 4) == b"PK\x03\x04"
        if zipped:
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > path.stat().st_size:  # torch.save compresses nothing: not its archive
                raise ValueError(
                    f"the archive would unpack to {unpacked} bytes, more than its size"
                )
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        if not isinstance(state, dict):
            raise ValueError(
                f"must contain a dict of tensors by name, not a {type(state).__name__}"
            )
        for name, tensor in state.items():
            if not _is_dense_tensor(name, tensor):
                raise ValueError(f"the value of {shorten_repr(name)} is not a dense tensor")
    except Exception as error:  # torch lets every kind of error of its readers through
        # torch's own text of an UnpicklingError recommends to allow the execution of code
        cause_of_error = (
            "" if isinstance(error, pickle.UnpicklingError) else f": {summarize_error(error)}"
        )
        raise InputError(
            f"{path.name}: not a complete file of dense tensors{cause_of_error}; download the file"
            " again, or save the model with save_pretrained"
        ) from None
    return state


def _is_dense_tensor(name: Any, tensor: Any) -> bool:
    """True if ``name`` is a printable string and ``tensor`` is a dense tensor of a supported dtype
    whose storage holds all its elements.
    """
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
    """Return one `TensorInfo` for each tensor of the legacy file ``path`` (``pytorch_model*.bin``).
    ``file`` is the file's name in them. Raises InputError if the file is not valid.
    """
    tensors = []
    position = 0
    for name, tensor in load_pickled_state(path).items():
        end = position + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        tensors.append(TensorInfo(name, dtype, tuple(tensor.shape), file, position, end))
        position = end
    return tensors
