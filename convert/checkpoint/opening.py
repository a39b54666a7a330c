"""Open a checkpoint by reading its headers: names, dtypes and shapes are known at once, other bytes
are read on demand.

Does not import torch, transformers or huggingface_hub until a tensor or a legacy file is read or a
hub id is used.
"""

import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint import hub
from kvfold.convert.checkpoint.files import open_source, portable_name, read_bytes
from kvfold.convert.checkpoint.folder import (
    CARD,
    CONFIG,
    DEQUANTIZE,
    LEGACY,
    file_states,
    index_problems,
    raise_problems,
    read_config,
    read_index,
    read_member,
    resolve_member,
    weight_file,
    with_templates,
)
from kvfold.convert.checkpoint.headers import Header, TensorInfo, read_header
from kvfold.convert.checkpoint.reader import Checkpoint, Reader
from kvfold.convert.errors import ADVICE, InputError, short

if TYPE_CHECKING:
    import torch

# The beginning of the text file that Git has in place of a large one
_LFS_POINTER = b"version https://git-lfs"
# Ends of the names of integer tensors that are weights; buffers such as masks and positions are not
_PACKED = (".weight", ".qweight", ".qzeros", ".weight_packed", ".SCB")

__all__ = ["Checkpoint", "TensorInfo", "check_opens", "open_checkpoint", "open_headers"]


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Open a folder or a hub id (``id@revision``, downloaded unless it is in the cache) and check
    every header.

    Raises one InputError with all problems: no such folder or id, a missing or invalid config.json,
    truncated or inconsistent files, links that leave the folder, quantized weights.
    """
    return _open_local(_locate(model))


def check_opens(*models: str) -> None:
    """Raise the errors of ``open_checkpoint`` for all ``models``, so that typos are found before
    torch is imported.
    """
    for model in models:
        open_checkpoint(model).close()


def open_headers(model: str | os.PathLike[str]) -> Checkpoint:
    """Like ``open_checkpoint``, but of a hub id, fetch only config, index, chat template and
    headers: no tensors.

    A legacy checkpoint on the hub has no separate headers, so all of it is downloaded. With
    HF_HUB_OFFLINE, every hub id is opened from the cache.
    """
    place = _locate(model)
    if isinstance(place, str):
        from huggingface_hub import constants

        if not constants.HF_HUB_OFFLINE:
            files = hub.remote_files(place)
            entry = weight_file(files.names, place)
            if entry not in LEGACY:
                config, digest = read_config(files.folder)
                # no states: a commit on the hub does not change
                opened = Checkpoint(
                    files.folder, config, {}, f"{place.partition('@')[0]}@{files.commit}", digest
                )
                return _with_tensors(opened, files.names, entry, partial(hub.remote_headers, files))
    return _open_local(place)


def _locate(model: str | os.PathLike[str]) -> Path | str:
    folder = Path(model)
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except (OSError, ValueError):  # also what no path can be: too long a name, a NUL character
        if hub.HUB_ID.fullmatch(str(model)):
            return str(model)
        raise InputError(
            f"{model}: no such folder; use a checkpoint's folder or a hub id (owner/name)"
        ) from None
    if not is_folder:
        advice = DEQUANTIZE if folder.suffix == ".gguf" else "use the folder that contains it"
        raise InputError(f"{folder} is a file, but a checkpoint is a folder; {advice}")
    return folder.resolve()


def _open_local(place: Path | str) -> Checkpoint:
    """Open a folder, or the snapshot of a hub id. A snapshot's folder is named after its commit."""
    if isinstance(place, Path):
        folder = place
        origin = portable_name(place)
    else:
        folder = hub.download(place).resolve()
        origin = f"{place.partition('@')[0]}@{folder.name}"
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        way_out = ADVICE.get(error.errno or 0, "make it readable")
        raise InputError(
            f"{folder}: its files cannot be listed ({error.strerror}); {way_out}"
        ) from None
    extra = with_templates(folder, names)
    # states are taken before anything is read: a change in between must not go unseen
    states = file_states(folder / name for name in (CONFIG, *extra))
    config, digest = read_config(folder)
    entry = weight_file(names, folder)
    states |= file_states([folder / entry])
    paths: dict[str, Path] = {}
    reader: Reader = _SafetensorsReader(paths)
    header_of: Callable[[Path, str], Header] = read_header
    if entry in LEGACY:
        from kvfold.convert.checkpoint.tensors import LegacyReader, read_legacy_header

        reader = LegacyReader(paths)
        header_of = read_legacy_header

    def headers(files: Collection[str]) -> dict[str, Header]:
        found = {}
        for file in files:
            try:
                paths[file] = resolve_member(folder, file, entry)
                states.update(file_states([paths[file]]))
                if read_bytes(paths[file], length=len(_LFS_POINTER)) == _LFS_POINTER:
                    raise InputError(
                        f"{file}: a Git LFS pointer, not the file itself; fetch it with `git lfs"
                        " pull`"
                    )
                found[file] = header_of(paths[file], file)
            except InputError as error:
                found[file] = Header(problems=[error.message])
        return found

    problems = []
    # a tokenizer that cannot be copied is told now, not after hours of converting
    for name in (*extra, *({CARD} & {*names})):
        try:
            read_member(folder, name, length=1)
        except InputError as error:
            problems.append(error.message)
    opened = Checkpoint(folder, config, {}, origin, digest, reader, states, paths=paths)
    return _with_tensors(opened, names, entry, headers, problems)


def _with_tensors(
    opened: Checkpoint,
    names: Collection[str],
    entry: str,
    headers_of: Callable[[Collection[str]], dict[str, Header]],
    problems: Collection[str] = (),
) -> Checkpoint:
    """Add the tensors of ``entry``, an index or a weight file, to ``opened``. Raises InputError
    with all problems.
    """
    weight_map = read_index(opened.folder, entry) if entry.endswith(".json") else {}
    headers = headers_of(sorted(set(weight_map.values())) or [entry])
    found = [*problems, *(problem for header in headers.values() for problem in header.problems)]
    if weight_map:
        found += index_problems(entry, weight_map, headers, names)
    tensors = {tensor.name: tensor for header in headers.values() for tensor in header.tensors}
    raise_problems(found)
    refuse_quantized(opened.origin, opened.config, tensors)
    return replace(opened, tensors=tensors)


def refuse_quantized(
    origin: str, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> None:
    """Raise InputError if ``config`` or a tensor says that the weights are quantized."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings:
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise InputError(f"{origin}: its weights are quantized ({short(method)}); {DEQUANTIZE}")
    for name, info in tensors.items():
        low = info.dtype == "F4" or info.dtype.startswith(("F8_", "F6_"))
        if low or (info.dtype[0] in "IU" and name.endswith(_PACKED)):
            raise InputError(
                f"{origin}: tensor {name!r} in {info.file} is quantized ({info.dtype});"
                f" {DEQUANTIZE}"
            )


class _SafetensorsReader(Reader):
    """Reads tensors from local safetensors files; ``paths`` maps file names to real paths."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self.raw = paths

    def read(self, info: TensorInfo) -> "torch.Tensor":
        from kvfold.convert.checkpoint.tensors import read_elements

        with open_source(self.raw[info.file]) as file:
            return read_elements(file.fileno(), info, info.start, info.end).reshape(info.shape)

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]":
        from kvfold.convert.checkpoint.tensors import read_elements, torch_dtype

        step = elements * torch_dtype(info.dtype).itemsize
        with open_source(self.raw[info.file]) as file:
            for start in range(info.start, info.end, step):
                yield read_elements(file.fileno(), info, start, min(start + step, info.end))
