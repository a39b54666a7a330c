"""SHA-256 hashes in ``kvfold.json``: of every tensor, of the headers of weight files and of other
files whole. Together they cover every byte of a checkpoint that kvfold wrote.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.headers import read_header_end
from kvfold.convert.checkpoint.members import (
    RECORD,
    get_file_states,
    list_files,
    parse_json_object,
    read_checkpoint_file,
    read_in_steps,
    resolve_checkpoint_file,
)
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.errors import InputError, shorten

_HASHED = 64 << 20  # chosen: hashing so many bytes takes less than a tenth of a second


def hash_file(path: Path, start: int = 0, end: int | None = None) -> str:
    """The SHA-256 of a file, or of its bytes ``start`` to ``end``. InputError if it ends before
    that.
    """
    digest = hashlib.sha256()
    for step in read_in_steps(path, start, path.stat().st_size if end is None else end):
        digest.update(step)
    return digest.hexdigest()


def fingerprint_files(paths: Iterable[Path]) -> list[list[Any]]:
    """Path, size, and SHA-256 of each existing file, as JSON values, to tell whether it changed
    since.

    A file above 64 MiB has its modification time in place of the SHA-256, which would take seconds
    per file.
    """
    # A copied or mounted folder has new times, and the hours of an interrupted run are not
    # discarded for that.
    return [
        [str(path), size, hash_file(path) if size <= _HASHED and path.is_file() else time]
        for path, (_, _, size, time) in get_file_states(paths).items()
    ]


def add_hashes(record: dict[str, Any], folder: Path, known: Mapping[str, str]) -> None:
    """Add the hashes of all files and tensors in ``folder`` to its ``record``. Tensors with a
    ``known`` hash are not read.
    """
    checkpoint = open_checkpoint(folder)
    checkpoint.digests.update(known)
    checkpoint.compute_model_digest()
    tensors = record.setdefault("tensors", {})
    for name, digest in checkpoint.digests.items():
        tensors.setdefault(name, {})["sha256"] = digest
    record["files"] = {
        name: _hash_checkpoint_file(folder / name) for name in _list_hashed_files(folder)
    }


def read_hashes(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The hashes of files and of tensors in the ``kvfold.json`` of ``folder``; empty without one.
    Raises InputError if it is damaged.
    """
    if not os.path.lexists(folder / RECORD):
        return {}, {}
    record = parse_json_object(folder / RECORD, read_checkpoint_file(folder, RECORD))
    with suppress(AttributeError):  # no objects
        tensors = record.get("tensors", {})
        hashes = {name: str(entry.get("sha256")) for name, entry in tensors.items()}
        files = record.get("files", {})
        if all(isinstance(digest, str) for digest in files.values()):
            return files, hashes
    raise InputError(
        f"{folder / RECORD}: 'files' and 'tensors' must map names to SHA-256 hashes; convert or"
        " download the checkpoint again"
    )


def find_changed_files(folder: Path, files: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for every file of ``folder`` that is missing, changed or new compared to
    ``files`` of its record. Of weight files, only the headers are compared.
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
                    f" {shorten(digest)}"
                )


def find_changed_tensors(checkpoint: Checkpoint, hashes: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for every tensor of ``checkpoint``, read before, whose hash is not in
    ``hashes``.
    """
    for name, digest in checkpoint.digests.items():
        if digest != hashes.get(name):
            yield (
                f"tensor {name!r} in {checkpoint.tensors[name].file}: changed since it was written:"
                f" its SHA-256 is {digest}, not {shorten(hashes.get(name))}"
            )


def _hash_checkpoint_file(path: Path) -> str:
    """The SHA-256 of a file; of a safetensors file, of its header, since the tensors have their
    own.
    """
    end = path.stat().st_size
    if path.suffix == ".safetensors":
        end = min(read_header_end(path), end)
    return hash_file(path, 0, end)


def _list_hashed_files(folder: Path) -> list[str]:
    """The files below ``folder``, except the record and top-level hidden ones (``.git``)."""
    return [name for name in list_files(folder) if name != RECORD and not name.startswith(".")]
