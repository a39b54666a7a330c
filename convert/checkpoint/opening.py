"""Open a checkpoint by reading its headers: names, dtypes and shapes are known at once, other bytes
are read on demand.

Does not import torch, transformers or huggingface_hub until a tensor or a legacy file is read or a
hub id is used.
"""

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint import hub
from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TensorInfo, read_header
from kvfold.convert.checkpoint.members import (
    CARD,
    CHAT_FILES,
    CONFIG,
    DEQUANTIZE,
    INDEX,
    LEGACY,
    LEGACY_INDEX,
    copy_range,
    extra_names,
    file_states,
    json_beside,
    open_source,
    parse_json,
    portable_name,
    raise_problems,
    read_bytes,
    read_config,
    read_member,
    resolve_member,
    weight_file,
    write_all,
)
from kvfold.convert.errors import ADVICE, InputError, KvfoldError, shorten

if TYPE_CHECKING:
    import torch

    from kvfold.convert.checkpoint.tensors import LegacyFiles

__all__ = ["Checkpoint", "TensorInfo", "check_opens", "open_checkpoint", "open_headers"]

# The beginning of the text file that Git has in place of a large one
_LFS_POINTER = b"version https://git-lfs"
_SHARD_NAMES = {
    INDEX: re.compile(r"model-\d+-of-\d+\.safetensors"),
    LEGACY_INDEX: re.compile(r"pytorch_model-\d+-of-\d+\.bin"),
}
# Ends of the names of integer tensors that are weights; buffers such as masks and positions are not
_PACKED = (".weight", ".qweight", ".qzeros", ".weight_packed", ".SCB")
_HUB_THREADS = 8
# Bytes copied at once. A thread that imports torch gives the interpreter's lock away every 5 ms or
# later, so that a copy beside it in smaller steps mostly waits for the lock.
_STEP = 8 << 20


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    ``folder`` has its files; of a hub model opened by its headers, only the small ones.
    ``config`` is the content of config.json.
    ``tensors`` are in byte order, file by file.
    ``origin`` names it without a local path: ``id@commit`` for a hub model, else the folder's name.
    ``config_hash`` is the SHA-256 of config.json.
    ``paths`` maps weight files to their real paths; empty if only headers were fetched.
    ``states`` describes every local file before it was read.
    ``legacy`` reads pickled weights; None for safetensors.
    ``digests`` has the SHA-256 of each tensor's bytes, once the tensor has been read.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    origin: str
    config_hash: str
    paths: Mapping[str, Path] = field(default_factory=dict)
    states: dict[Path, tuple[int, int, int, int]] = field(default_factory=dict)
    legacy: "LegacyFiles | None" = None
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def hub_id(self) -> str | None:
        """The model's id on the hub, or None for a folder."""
        return self.origin.partition("@")[0] if "/" in self.origin else None

    @property
    def chats(self) -> bool:
        """True if the tokenizer has a chat template, which is in one of two files."""
        settings, template = CHAT_FILES
        return (
            bool(json_beside(self.folder, settings).get("chat_template"))
            or (self.folder / template).is_file()
        )

    def float_bytes(self) -> Counter[str]:
        """The bytes of floating-point tensors by dtype."""
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            if info.dtype in FLOAT_DTYPES:
                sizes[info.dtype] += info.nbytes
        return sizes

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise KvfoldError(f"{self.origin} has no tensor {name!r}")
        return self.tensors[name]

    def read(self, name: str) -> "torch.Tensor":
        """Read a tensor in its stored dtype into CPU memory of its own. KvfoldError if only headers
        were fetched.
        """
        import torch

        shape = self.info(name).shape
        (whole,) = self.chunks(name)
        if self.legacy is not None:  # a view of the mapped file
            whole = whole.clone(memory_format=torch.contiguous_format)
        return whole.reshape(shape)

    def chunks(self, name: str, elements: int | None = None) -> "Iterator[torch.Tensor]":
        """Yield a tensor's elements in order, as flat CPU tensors of at most ``elements`` each, to
        limit memory use; all at once without ``elements``.
        """
        from kvfold.convert.checkpoint.tensors import read_chunks, tensor_memory

        info = self.info(name)
        path = self._path(info)
        digest = None if name in self.digests else hashlib.sha256()
        if self.legacy is None:
            found = read_chunks(path, info, elements)
        else:
            found = self.legacy.chunks(path, info, elements)
        for chunk in found:
            if digest is not None:
                digest.update(tensor_memory(chunk))
            yield chunk
        if digest is not None:
            self.digests[name] = digest.hexdigest()

    def copy(self, name: str, dtype: str, target: int, position: int) -> Iterator[int]:
        """Copy a tensor's bytes, cast to the safetensors ``dtype`` if it has another, to
        ``position`` of the open file ``target``. Yields the size of each step.
        """
        info = self.info(name)
        if self.legacy is None and dtype == info.dtype:
            with open_source(self._path(info)) as file:
                for start in range(info.start, info.end, _STEP):
                    count = min(_STEP, info.end - start)
                    copy_range(file, start, count, target, position)
                    position += count
                    yield count
            return
        from kvfold.convert.checkpoint.tensors import cast_chunk, tensor_memory, torch_dtype

        for chunk in self.chunks(name, _STEP // 4):
            data = tensor_memory(cast_chunk(chunk, torch_dtype(dtype), name))
            write_all(target, data, position)
            position += len(data)
            yield len(data)

    def _path(self, info: TensorInfo) -> Path:
        if info.file not in self.paths:
            raise KvfoldError(
                f"tensor {info.name!r} cannot be read: only headers were fetched; use"
                " open_checkpoint"
            )
        return self.paths[info.file]

    def model_digest(self) -> str:
        """The SHA-256 of config.json and of every tensor's name, dtype, shape and bytes, however
        they are divided into files.

        Reads the tensors that were not read yet.
        """
        lines = [f"{self.config_hash} {CONFIG}\n"]
        for name, info in sorted(self.tensors.items()):
            if name not in self.digests:
                for _ in self.chunks(name, _STEP):
                    pass
            lines.append(f"{self.digests[name]} {info.dtype} {list(info.shape)} {name}\n")
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def extra_files(self) -> list[Path]:
        """Paths of the tokenizer, generation, chat template and license files in ``folder``; no
        Python, no weights.
        """
        return [self.folder / name for name in extra_names(self.folder, os.listdir(self.folder))]

    def check_unchanged(self) -> None:
        """Raise InputError if a file has changed since the checkpoint was opened. Call this before
        publishing.
        """
        after = file_states(self.states)
        changed = [path.name for path, state in self.states.items() if after.get(path) != state]
        if changed:
            raise InputError(
                f"{self.origin}: {', '.join(changed)} changed during the run, so no output was"
                " kept; run again when nothing writes to it"
            )

    def close(self) -> None:
        """Release memory and files; a later read opens them again."""
        if self.legacy is not None:
            self.legacy.close()


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Open a folder or a hub id (``id@revision``, downloaded unless it is in the cache) and check
    every header.

    Raises one InputError with all problems: no such folder or id, a missing or invalid config.json,
    truncated or inconsistent files, links that leave the folder, quantized weights.
    """
    place = _locate(model)
    if isinstance(place, Path):
        return _open_folder(place, portable_name(place))
    folder = hub.download(place).resolve()
    # a snapshot's folder is named after its commit
    return _open_folder(folder, f"{place.partition('@')[0]}@{folder.name}")


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
    if isinstance(place, Path):
        return open_checkpoint(place)
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return open_checkpoint(place)
    files = hub.remote_files(place)
    entry = weight_file(files.names, place)
    if entry in LEGACY:
        return open_checkpoint(place)
    config, digest = read_config(files.folder)
    weight_map = _read_index(files.folder, entry)
    with ThreadPoolExecutor(_HUB_THREADS) as pool:
        headers = {
            file: pool.submit(hub.remote_header, files, file) for file in _shards(weight_map, entry)
        }
    tensors = {}
    problems: list[str] = []
    for file, header in headers.items():
        with _collect_problems(problems):
            tensors[file] = header.result()
    # no states: a commit on the hub does not change
    opened = Checkpoint(
        files.folder, config, {}, f"{place.partition('@')[0]}@{files.commit}", digest
    )
    return _add_tensors(opened, tensors, entry, weight_map, files.names, problems)


def _locate(model: str | os.PathLike[str]) -> Path | str:
    """The real path of a folder, or the hub id."""
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


def _open_folder(folder: Path, origin: str) -> Checkpoint:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        way_out = ADVICE.get(error.errno or 0, "make it readable")
        raise InputError(
            f"{folder}: its files cannot be listed ({error.strerror}); {way_out}"
        ) from None
    extra = extra_names(folder, names)
    # states are taken before anything is read: a change in between must not go unseen
    states = file_states(folder / name for name in (CONFIG, *extra))
    config, digest = read_config(folder)
    entry = weight_file(names, folder)
    states |= file_states([folder / entry])
    problems: list[str] = []
    # a tokenizer that cannot be copied is told now, not after hours of converting
    for name in (*extra, *({CARD} & {*names})):
        with _collect_problems(problems):
            read_member(folder, name, length=1)
    read = read_header
    legacy = None
    if entry in LEGACY:
        from kvfold.convert.checkpoint.tensors import LegacyFiles, read_legacy_header

        legacy = LegacyFiles()
        read = read_legacy_header
    weight_map = _read_index(folder, entry)
    paths = {}
    tensors = {}
    for file in _shards(weight_map, entry):
        with _collect_problems(problems):
            path = paths[file] = resolve_member(folder, file, entry)
            states |= file_states([path])
            if read_bytes(path, length=len(_LFS_POINTER)) == _LFS_POINTER:
                raise InputError(
                    f"{file}: a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
                )
            tensors[file] = read(path, file)
    opened = Checkpoint(folder, config, {}, origin, digest, paths, states, legacy)
    return _add_tensors(opened, tensors, entry, weight_map, names, problems)


@contextmanager
def _collect_problems(problems: list[str]) -> Iterator[None]:
    """Append the lines of an InputError in the block to ``problems``."""
    try:
        yield
    except InputError as error:
        problems += [error.message, *error.details]


def _add_tensors(
    opened: Checkpoint,
    tensors: dict[str, list[TensorInfo]],
    entry: str,
    weight_map: dict[str, str],
    names: Iterable[str],
    problems: list[str],
) -> Checkpoint:
    """Add the ``tensors`` of each readable file to ``opened``. Raises InputError with ``problems``
    and the contradictions between the index ``entry``, the files it lists and the ``names`` in the
    folder.
    """
    if weight_map:
        problems += _index_problems(entry, weight_map, tensors, names)
    raise_problems(problems)
    infos = [info for file in tensors.values() for info in file]
    _refuse_quantized(opened, infos)
    return replace(opened, tensors={info.name: info for info in infos})


def _shards(weight_map: dict[str, str], entry: str) -> list[str]:
    return sorted(set(weight_map.values())) or [entry]


def _read_index(folder: Path, entry: str) -> dict[str, str]:
    """The ``weight_map`` of the index ``entry``: file names by tensor name. Empty if ``entry`` is
    the only weight file.
    """
    if not entry.endswith(".json"):
        return {}
    weight_map = parse_json(folder / entry, read_member(folder, entry)).get("weight_map")
    if (
        isinstance(weight_map, dict)
        and weight_map
        and all(isinstance(file, str) for file in weight_map.values())
    ):
        return weight_map
    raise InputError(
        f"{folder / entry} needs a 'weight_map' from tensor names to file names; download the file"
        " again"
    )


def _index_problems(
    index: str,
    weight_map: dict[str, str],
    tensors: dict[str, list[TensorInfo]],
    names: Iterable[str],
) -> list[str]:
    listed = set(weight_map.values())
    problems = [
        f"{name}: {index} does not mention this shard; remove it or fix the index"
        for name in sorted(names)
        if _SHARD_NAMES[index].fullmatch(name) and name not in listed  # of another save
    ]
    stored = {(info.name, file) for file, infos in tensors.items() for info in infos}
    for name, file in weight_map.items():
        # a file that could not be read has been reported
        if file in tensors and (name, file) not in stored:
            problems.append(f"{index}: {file} lacks the listed tensor {name!r}; fetch both again")
    for name, file in sorted(stored - weight_map.items()):
        problems.append(f"{file}: {index} does not list its tensor {name!r}; fetch both again")
    return problems


def _refuse_quantized(opened: Checkpoint, tensors: Iterable[TensorInfo]) -> None:
    """Raise InputError if the config or a tensor says that the weights are quantized."""
    settings = opened.config.get("quantization_config") or opened.config.get("compression_config")
    if settings:
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise InputError(
            f"{opened.origin}: its weights are quantized ({shorten(method)}); {DEQUANTIZE}"
        )
    for info in tensors:
        packed = info.dtype[0] in "IU" and info.name.endswith(_PACKED)
        if packed or info.dtype.startswith(("F8_", "F6_", "F4")):
            raise InputError(
                f"{opened.origin}: tensor {info.name!r} in {info.file} is quantized ({info.dtype});"
                f" {DEQUANTIZE}"
            )
