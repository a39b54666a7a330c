"""SHA-256 hashes of a converted checkpoint, stored in its ``kvfold.json``: one for each tensor, for
the header of each weight file, and for each other file. Together they cover every byte that kvfold
wrote.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.files import (
    RECORD,
    get_file_states,
    list_files,
    parse_json_object,
    read_checkpoint_file,
    read_in_steps,
    resolve_checkpoint_file,
)
from kvfold.convert.checkpoint.headers import read_header_end
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import InputError, shorten_repr

_HASHED = 64 << 20  # chosen: hashing so many bytes takes less than a tenth of a second


def hash_file(path: Path, end: int | None = None) -> str:
    """Return the SHA-256 of the file ``path``, or of its bytes before ``end``, as hex digits.
    Raises InputError if the file ends before ``end``.
    """
    digest = hashlib.sha256()
    for step in read_in_steps(path, 0, path.stat().st_size if end is None else end):
        digest.update(step)
    return digest.hexdigest()


def fingerprint_files(paths: Iterable[Path]) -> list[list[Any]]:
    """Return ``[path, size, SHA-256]`` for each existing file, as JSON values. A resumed run
    compares them to tell whether a file has changed.

    A file above 64 MiB has its modification time in place of the SHA-256, which would take seconds
    per file.
    """
    # A copied or mounted folder has new times, and the hours of an interrupted run are not
    # discarded for that.
    return [
        [str(path), size, hash_file(path) if size <= _HASHED and path.is_file() else time]
        for path, (_, _, size, time) in get_file_states(paths).items()
    ]


def add_hashes(record: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Add the SHA-256 hashes of all files and tensors of ``checkpoint`` to ``record``, the content
    of its ``kvfold.json``. Tensors that were read since it was opened are not read again, nor those
    whose ``digests`` are known.
    """
    checkpoint.compute_model_digest()
    folder = checkpoint.folder
    tensors = record.setdefault("tensors", {})
    for name, digest in checkpoint.digests.items():
        tensors.setdefault(name, {})["sha256"] = digest
    record["files"] = {
        name: _hash_checkpoint_file(folder / name) for name in _list_hashed_files(folder)
    }


def read_hashes(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return two dicts from the ``kvfold.json`` of ``folder``: SHA-256 by file name, and by tensor
    name. Both are empty if there is no such file. Raises InputError if it is damaged.
    """
    if not os.path.lexists(folder / RECORD):
        return {}, {}
    record = parse_json_object(folder / RECORD, read_checkpoint_file(folder, RECORD))
    with suppress(AttributeError):  # no objects
        tensors = record.get("tensors", {})
        hashes = {name: entry["sha256"] for name, entry in tensors.items() if entry.get("sha256")}
        files = record.get("files", {})
        if all(isinstance(digest, str) for digest in files.values()):
            return files, hashes
    raise InputError(
        f"{folder / RECORD}: 'files' and 'tensors' must map names to SHA-256 hashes; convert or"
        " download the checkpoint again"
    )


def find_changed_files(folder: Path, files: Mapping[str, str]) -> Iterator[str]:
    """Yield one message for each file of ``folder`` that is missing, new, or different from its
    hash in ``files``, which maps names to SHA-256. Of weight files, only the headers are hashed.
    """
    for name in sorted(set(_list_hashed_files(folder)) - files.keys()):
        yield f"{name}: kvfold did not write this file"
    for name, digest in files.items():
        try:
            now = _hash_checkpoint_file(resolve_checkpoint_file(folder, name, RECORD))
        except InputError as error:
            yield error.message
        else:
            if now != digest:
                yield (
                    f"{name}: changed since it was written: its SHA-256 is {now}, not"
                    f" {shorten_repr(digest)}"
                )


def find_changed_tensors(checkpoint: Checkpoint, hashes: Mapping[str, str]) -> Iterator[str]:
    """Yield one message for each tensor of ``checkpoint`` whose SHA-256 differs from the one in
    ``hashes``. Only tensors that have been read are compared.
    """
    for name, digest in checkpoint.digests.items():
        if digest != hashes.get(name):
            yield (
                f"tensor {name!r} in {checkpoint.tensors[name].file}: changed since it was written:"
                f" its SHA-256 is {digest}, not {shorten_repr(hashes.get(name))}"
            )


def _hash_checkpoint_file(path: Path) -> str:
    """Return the SHA-256 of a file. Of a safetensors file, only the header is hashed, because each
    tensor has its own hash.
    """
    end = path.stat().st_size
    if path.suffix == ".safetensors":
        end = min(read_header_end(path), end)
    return hash_file(path, end)


def _list_hashed_files(folder: Path) -> list[str]:
    """Return the relative paths of all files in ``folder`` and its subfolders that get a hash: all
    but ``kvfold.json`` and names that begin with a dot, such as ``.git``.
    """
    return [name for name in list_files(folder) if name != RECORD and not name.startswith(".")]
