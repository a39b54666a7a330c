"""Open a checkpoint by its headers: names, dtypes and shapes are known at once, bytes are read on demand.

Imports no torch, transformers or huggingface_hub until a tensor is read or a hub id is given.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint import folder as folders
from kvfold.convert.checkpoint import hub
from kvfold.convert.checkpoint.dequantized import check_libraries, dequantized, undeclared_problems
from kvfold.convert.checkpoint.file_bytes import open_source
from kvfold.convert.checkpoint.headers import Header, TensorInfo
from kvfold.convert.checkpoint.json_text import portable_name
from kvfold.convert.checkpoint.reader import Reader, Weights
from kvfold.convert.errors import InputError, KvfoldError

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "TensorInfo", "check_opens", "open_checkpoint", "open_headers"]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    ``tensors`` are in the order of their bytes, file by file. ``origin`` names the source without a machine path:
    ``id@commit`` for a hub model, else the folder's name. ``digests``: the sha256 of config.json and of each file's
    header. ``aliases`` maps a tensor that shares its storage with an earlier one of the same shape to that one (legacy
    files only; both are in ``tensors``). ``states``: every local file before it was read. ``made_of``: the stored
    formats that dense weights were dequantized from, a line for each.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    origin: str
    digests: dict[str, str]
    reader: Reader
    aliases: dict[str, str]
    states: dict[Path, folders.FileState] = field(default_factory=dict)
    made_of: tuple[str, ...] = ()

    @property
    def hub_id(self) -> str | None:
        """The model's id on the hub, None for a folder."""
        return self.origin.partition("@")[0] if "/" in self.origin else None

    def read(self, name: str) -> "torch.Tensor":
        """The tensor on the CPU in its stored dtype, owning its memory. KvfoldError if opened from remote headers."""
        return self.reader.read(self.info(name))

    def chunks(self, name: str, elements: int) -> "Iterator[torch.Tensor]":
        """The tensor's elements in order as flat CPU tensors of at most ``elements`` each: bounded memory."""
        return self.reader.chunks(self.info(name), elements)

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise KvfoldError(f"{self.origin}: expected a tensor {name!r}, found none")
        return self.tensors[name]

    def raw_path(self, info: TensorInfo) -> Path | None:
        """The file with the tensor's bytes at ``start`` .. ``end``; None for legacy, remote and made tensors."""
        return self.reader.raw_path(info)

    def source_hash(self) -> str:
        """sha256 over config.json and every file's header: names the checkpoint without reading its weights."""
        digest = hashlib.sha256()
        for file, value in sorted(self.digests.items()):
            digest.update(f"{file}\0{value}\n".encode())
        return digest.hexdigest()

    def extra_files(self) -> list[Path]:
        """Tokenizer, generation, chat template and license files, as paths in ``folder``; no Python, no weights.

        Copy their contents (``shutil.copyfile``): in a hub cache the paths are links.
        """
        return [self.folder / name for name in folders.extra_names(os.listdir(self.folder))]

    def python_files(self) -> list[Path]:
        """Python files next to the weights (remote code)."""
        return sorted(path for path in self.folder.iterdir() if path.suffix == ".py")

    def check_unchanged(self) -> None:
        """Raises InputError if a file changed since the checkpoint was opened; call before publishing."""
        if changes := folders.changed_files(self.states):
            raise InputError(
                f"{self.origin}: expected its files to stay as they were, found {len(changes)} of them changed during "
                "the run; nothing was kept: run again once nothing writes to them",
                changes,
            )

    def close(self) -> None:
        self.reader.close()


def open_checkpoint(model: str | os.PathLike[str], dtype: str = "BF16") -> Checkpoint:
    """Open a folder or a hub id (``id@revision``; downloaded, or from the cache) and check every header.

    Quantized weights appear as dense ones of the safetensors ``dtype``. Raises InputError with every problem of the
    files at once: no such folder or id, no or bad config.json, truncated or inconsistent files, links that leave the
    folder, a quantization that is not supported or whose library is not installed.
    """
    checkpoint = _open_local(_locate(model), dtype)
    check_libraries(checkpoint.reader)
    return checkpoint


def check_opens(*models: str) -> None:
    """Raise the errors of ``open_checkpoint`` for each of ``models``: a mistyped name ends before torch is imported."""
    for model in models:
        open_checkpoint(model).close()


def open_headers(model: str | os.PathLike[str], dtype: str = "BF16") -> Checkpoint:
    """As ``open_checkpoint``, but of a hub id only config, index and headers are fetched; ``read`` then fails.

    A legacy checkpoint on the hub has no headers to fetch and is downloaded whole. With HF_HUB_OFFLINE every hub id is
    opened from the cache.
    """
    place = _locate(model)
    if isinstance(place, hub.HubModel):
        from huggingface_hub import constants

        if not constants.HF_HUB_OFFLINE:
            files = hub.remote_files(place)
            entry, legacy = folders.weight_files(files.names, str(place))
            if not legacy:
                return _open_remote(files, entry, dtype)
    return _open_local(place, dtype)


def _locate(model: str | os.PathLike[str]) -> Path | hub.HubModel:
    folder = Path(model)
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except (OSError, ValueError):  # also what no path can be: too long a name, a NUL character
        is_folder = None
    if is_folder:
        return folder.resolve()
    if is_folder is not None:
        advice = folders.DEQUANTIZE if folder.suffix == ".gguf" else "give the folder it lies in"
        raise InputError(f"{folder}: expected a checkpoint's folder, found a file; {advice}")
    named = hub.parse_hub_id(str(model))
    if named is None:
        raise InputError(f"{model}: expected a checkpoint's folder or a hub id (owner/name), found no such folder")
    return named


def _open_local(place: Path | hub.HubModel, dtype: str) -> Checkpoint:
    """Open a folder, or the snapshot of a hub id, whose folder is named for its commit."""
    if isinstance(place, Path):
        folder, origin = place, portable_name(place)
    else:
        folder = hub.download(place).resolve()
        origin = f"{place.id}@{folder.name}"
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise InputError(f"{folder}: expected to be able to list its files, found: {error.strerror}") from None
    extra = folders.extra_names(names)
    # states are taken before anything is read: a change in between must not go unseen
    states = folders.file_states(folder / name for name in (folders.CONFIG, *extra))
    config, digest = folders.read_config(folder)
    entry, legacy = folders.weight_files(names, str(folder))
    states |= folders.file_states([folder / entry])
    weight_map, files = _weight_map(folder, entry)
    problems = folders.stray_shards(names, entry, weight_map) if weight_map else []
    # a tokenizer that cannot be copied is told now, not after hours of converting
    for name in extra:
        try:
            folders.read_bytes(folders.resolve_member(folder, name), limit=1)
        except InputError as error:
            problems.append(error.message)
    headers: dict[str, Header] = {}
    paths: dict[str, Path] = {}
    aliases: dict[str, str] = {}
    for file in files:
        try:
            paths[file] = folders.resolve_member(folder, file)
            states |= folders.file_states([paths[file]])
            if legacy:
                from kvfold.convert.checkpoint.tensors import read_legacy_header

                headers[file] = read_legacy_header(paths[file], file, aliases)
            else:
                headers[file] = folders.read_header(paths[file], file)
        except InputError as error:
            headers[file] = Header(problems=[error.message])
    reader: Reader = _SafetensorsReader(paths)
    if legacy:
        from kvfold.convert.checkpoint.tensors import LegacyReader

        reader = LegacyReader(paths)
    stored = Weights(config, _checked(config, entry, weight_map, headers, problems), reader)
    made = dequantized(stored, dtype, str(folder))
    digests = {folders.CONFIG: digest, **{file: header.digest for file, header in headers.items()}}
    return Checkpoint(folder, made.config, made.tensors, origin, digests, made.reader, aliases, states, made.made_of)


def _open_remote(files: hub.RemoteFiles, entry: str, dtype: str) -> Checkpoint:
    folder = files.folder.resolve()
    config, digest = folders.read_config(folder)
    weight_map, shards = _weight_map(folder, entry)
    headers = hub.remote_headers(files, shards)
    problems = folders.stray_shards(files.names, entry, weight_map) if weight_map else []
    stored = Weights(config, _checked(config, entry, weight_map, headers, problems), Reader())
    made = dequantized(stored, dtype, str(files.model))
    digests = {folders.CONFIG: digest, **{file: header.digest for file, header in headers.items()}}
    origin = f"{files.model.id}@{files.commit}"
    # no states: a commit on the hub does not change
    return Checkpoint(folder, made.config, made.tensors, origin, digests, made.reader, {}, made_of=made.made_of)


def _weight_map(folder: Path, entry: str) -> tuple[dict[str, str], list[str]]:
    """The index (empty for a single file) and the files that hold the weights."""
    if not entry.endswith(".json"):
        return {}, [entry]
    weight_map = folders.parse_index(folder / entry, folders.read_bytes(folders.resolve_member(folder, entry)))
    return weight_map, sorted(set(weight_map.values()))


def _checked(
    config: dict[str, Any], entry: str, weight_map: dict[str, str], headers: dict[str, Header], problems: list[str]
) -> dict[str, TensorInfo]:
    """All tensors, if files and index agree. InputError with every problem otherwise."""
    problems = [*problems, *(problem for header in headers.values() for problem in header.problems)]
    if weight_map:
        problems += folders.index_problems(entry, weight_map, headers)
    tensors = {tensor.name: tensor for header in headers.values() for tensor in header.tensors}
    folders.raise_problems([*problems, *undeclared_problems(config, tensors)])
    return tensors


@dataclass(frozen=True)
class _SafetensorsReader(Reader):
    """Reads local safetensors files by position; ``paths`` maps file names to real paths."""

    paths: dict[str, Path]

    def read(self, info: TensorInfo) -> "torch.Tensor":
        from kvfold.convert.checkpoint.tensors import read_elements

        with open_source(self.paths[info.file]) as file:
            return read_elements(file.fileno(), info, info.start, info.end).reshape(info.shape)

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]":
        from kvfold.convert.checkpoint.tensors import read_elements, torch_dtype

        step = elements * torch_dtype(info.dtype).itemsize
        with open_source(self.paths[info.file]) as file:
            for start in range(info.start, info.end, step):
                yield read_elements(file.fileno(), info, start, min(start + step, info.end))

    def raw_path(self, info: TensorInfo) -> Path | None:
        return self.paths[info.file]
