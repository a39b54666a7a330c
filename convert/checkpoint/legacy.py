"""``pytorch_model*.bin``: pickled tensors, read with ``weights_only=True`` and mapped into memory, a file at a time."""

import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

from kvfold.convert.checkpoint.headers import Header, TensorInfo
from kvfold.convert.checkpoint.reader import flat_chunks
from kvfold.convert.checkpoint.tensors import TORCH_DTYPES, dtype_name
from kvfold.convert.errors import first_line


class LegacyReader:
    """Tensors of legacy files. One saved by a torch before 1.6 cannot be mapped: it is in memory while in use."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths = paths
        self._file = ""
        self._state: dict[str, torch.Tensor] = {}

    def read(self, info: TensorInfo) -> torch.Tensor:
        return self._tensor(info).detach().clone(memory_format=torch.contiguous_format)

    def chunks(self, info: TensorInfo, elements: int) -> Iterator[torch.Tensor]:
        return flat_chunks(self._tensor(info), elements)

    def raw_path(self, info: TensorInfo) -> Path | None:
        return None

    def close(self) -> None:
        self._file, self._state = "", {}

    def _tensor(self, info: TensorInfo) -> torch.Tensor:
        if info.file != self._file:
            self.close()
            self._file, self._state = info.file, load_state(self._paths[info.file])
        return self._state[info.name]


def load_state(path: Path) -> dict[str, torch.Tensor]:
    """The pickled mapping. ValueError saying why, in one line, when it is not a plain mapping of names to tensors."""
    try:
        zipped = _is_zip(path)
        if zipped:
            _check_sizes(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # torch lets every kind of error of its unpickler and of its archive reader through
        raise ValueError(f"expected a whole file of plain tensors, found: {first_line(error)}") from None
    if not isinstance(state, dict):
        raise ValueError(f"expected a mapping of names to tensors, found {type(state).__name__}")
    return state


def read_legacy_header(path: Path, file: str, aliases: dict[str, str]) -> Header:
    """The tensors of a legacy file. Tensors that share storage and shape with an earlier one go to ``aliases``."""
    try:
        state = load_state(path)
    except ValueError as error:
        return Header(problems=[f"{file}: {error}; fetch it again, or save the model with save_pretrained"])
    header, position, storages = Header(), 0, dict[tuple[object, ...], str]()
    for name, tensor in state.items():
        problem = _problem(name, tensor)
        if problem:
            header.problems.append(f"{file}: {problem}")
            continue
        length = tensor.numel() * tensor.element_size()
        info = TensorInfo(name, dtype_name(tensor.dtype), tuple(tensor.shape), file, position, position + length)
        header.tensors.append(info)
        position += length
        first = storages.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), name)
        if first != name and length:
            aliases[name] = first
    header.digest = _digest(header, path)
    return header


def _problem(name: object, tensor: object) -> str:
    if not isinstance(name, str):
        return f"expected names as keys, found {name!r}"
    if not isinstance(tensor, torch.Tensor):
        return f"{name!r}: expected a tensor, found {type(tensor).__name__}"
    if tensor.layout != torch.strided or tensor.is_meta:
        return f"tensor {name!r}: expected a dense tensor, found {'meta' if tensor.is_meta else tensor.layout}"
    if tensor.dtype not in TORCH_DTYPES.values():
        return f"tensor {name!r}: expected a plain dtype, found {tensor.dtype}"
    return ""


def _digest(header: Header, path: Path) -> str:
    """Names, dtypes and shapes: what a safetensors header would hold, and the file's size."""
    entries = [f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}" for tensor in header.tensors]
    return hashlib.sha256("\n".join([*entries, str(path.stat().st_size)]).encode()).hexdigest()


def _check_sizes(path: Path) -> None:
    """ValueError for an archive that unpacks to more than its own size: torch.save compresses nothing."""
    with zipfile.ZipFile(path) as archive:
        unpacked, size = sum(entry.file_size for entry in archive.infolist()), path.stat().st_size
    if unpacked > size:
        raise ValueError(f"an archive of {size} bytes that unpacks to {unpacked}")


def _is_zip(path: Path) -> bool:
    """Whether torch.save wrote an archive (since torch 1.6), which can be mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
