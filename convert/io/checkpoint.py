"""A checkpoint seen through its headers: what it holds is known at once, a tensor's bytes are read when asked for.

Nothing here imports torch, transformers or huggingface_hub until a tensor is read or a hub id is given.
"""

import fnmatch
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.io import folder as folders
from kvfold.convert.io.headers import Header, TensorInfo

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint", "open_headers"]


class Reader(Protocol):
    """Where tensors come from. ``raw_path`` is None when their bytes do not lie in a file at ``start`` .. ``end``."""

    def read(self, info: TensorInfo) -> "torch.Tensor": ...

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]": ...

    def raw_path(self, file: str) -> Path | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    ``tensors`` are in the order of their bytes, file by file. ``aliases`` maps a tensor that shares its storage with an
    earlier one of the same shape to that one (legacy files only; both are in ``tensors``). ``origin`` names the source
    without a machine path: ``id@commit`` for a hub model, else the folder's name.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    origin: str
    digests: dict[str, str]  # file -> sha256 of its header; "config.json" -> sha256 of its bytes
    reader: Reader
    aliases: dict[str, str]

    def read(self, name: str) -> "torch.Tensor":
        """The tensor on the CPU in its stored dtype, owning its memory. KvfoldError when opened from remote headers."""
        return self.reader.read(self.info(name))

    def chunks(self, name: str, elements: int) -> "Iterator[torch.Tensor]":
        """The tensor's elements in order as flat CPU tensors of at most ``elements`` each: bounded memory."""
        return self.reader.chunks(self.info(name), elements)

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise KvfoldError(f"{self.origin}: expected a tensor {name!r}, found none")
        return self.tensors[name]

    def raw_path(self, file: str) -> Path | None:
        """The file in which the tensors' bytes lie at ``start`` .. ``end``, or None (legacy or remote)."""
        return self.reader.raw_path(file)

    def source_hash(self) -> str:
        """sha256 over config.json and every file's header: names the checkpoint without reading its weights."""
        digest = hashlib.sha256()
        for file, value in sorted(self.digests.items()):
            digest.update(f"{file}\0{value}\n".encode())
        return digest.hexdigest()

    def extra_files(self) -> list[Path]:
        """Tokenizer, generation, chat template and licence files, as paths in ``folder``; no Python, no weights.

        Copy their contents (``shutil.copyfile``), not the links a hub cache is made of.
        """
        names = _file_names(self.folder)
        extra = [
            name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in folders.EXTRA_PATTERNS)
        ]
        return [self.folder / name for name in extra if Path(name).suffix not in (".py", *folders.WEIGHT_SUFFIXES)]

    def python_files(self) -> list[Path]:
        """Python files beside the weights (remote code)."""
        return [self.folder / name for name in _file_names(self.folder) if name.endswith(".py")]

    def close(self) -> None:
        self.reader.close()


class _SafetensorsReader:
    """Reads by position; holds no file open between reads."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths = paths

    def read(self, info: TensorInfo) -> "torch.Tensor":
        from kvfold.convert.io.tensors import read_tensor

        return read_tensor(self._paths[info.file], info)

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]":
        from kvfold.convert.io.tensors import read_chunks

        return read_chunks(self._paths[info.file], info, elements)

    def raw_path(self, file: str) -> Path | None:
        return self._paths[file]

    def close(self) -> None:
        pass


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Open a folder or a hub id (``id@revision``; downloaded whole, or taken from the cache) and check every header.

    Raises InputError: no such folder or id, no or bad config.json, quantised, truncated or inconsistent files, links
    that leave the folder. All problems of the files are told at once.
    """
    return _open_folder(_local_folder(model))


def open_headers(model: str | os.PathLike[str]) -> Checkpoint:
    """As ``open_checkpoint``, but of a hub id only config, index and headers are fetched; ``read`` then fails."""
    return _open_folder(_local_folder(model))


def _local_folder(model: str | os.PathLike[str]) -> Path:
    folder = Path(model)
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        raise InputError(f"{folder}: expected a checkpoint's folder, found a file; give the folder it lies in")
    raise InputError(f"{folder}: expected a checkpoint's folder or a hub id (owner/name), found no such folder")


def _open_folder(folder: Path, origin: str | None = None) -> Checkpoint:
    config, digest = folders.read_config(folder)
    names = _file_names(folder)
    folders.raise_problems(folders.quantised_problems(config, [], str(folder)))
    entry, _legacy = folders.weight_files(names, str(folder))
    weight_map, files = _weight_map(folder, entry)
    paths: dict[str, Path] = {}
    headers: dict[str, Header] = {}
    problems = folders.stray_shards(names, entry, weight_map) if weight_map else []
    for file in files:
        try:
            paths[file] = folders.resolve_member(folder, file)
            headers[file] = folders.read_header(paths[file], file)
        except InputError as error:
            headers[file] = Header(problems=[error.message])
    problems += [problem for header in headers.values() for problem in header.problems]
    problems += folders.index_problems(entry, weight_map, headers) if weight_map else []
    tensors = {tensor.name: tensor for header in headers.values() for tensor in header.tensors}
    problems += folders.quantised_problems(config, tensors.values(), str(folder))
    folders.raise_problems(problems)
    digests = {folders.CONFIG: digest, **{file: header.digest for file, header in headers.items()}}
    return Checkpoint(folder, config, tensors, origin or folder.name, digests, _SafetensorsReader(paths), {})


def _weight_map(folder: Path, entry: str) -> tuple[dict[str, str], list[str]]:
    """The index (empty for a single file) and the files that hold the weights."""
    if not entry.endswith(".json"):
        return {}, [entry]
    weight_map = folders.parse_index(folder / entry, folders.read_bytes(folders.resolve_member(folder, entry)))
    return weight_map, sorted(set(weight_map.values()))


def _file_names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))
