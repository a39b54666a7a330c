"""SHA-256 hashes in ``kvfold.json``: of every tensor, of the headers of weight files and of other
files whole. Together they cover every byte of a checkpoint that kvfold wrote.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.headers import LENGTH_BYTES, MAX_HEADER
from kvfold.convert.checkpoint.members import (
    RECORD,
    list_files,
    open_source,
    read_bytes,
    read_into,
    resolve_member,
)
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.errors import InputError, shorten

_STEP = 1 << 20


def hash_file(path: Path, start: int = 0, end: int | None = None) -> str:
    """The SHA-256 of a file, or of its bytes ``start`` to ``end``. InputError if it ends before
    that.
    """
    with open_source(path) as file:
        if end is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_STEP))
        for position in range(start, end, _STEP):
            part = buffer[: end - position]
            read_into(part, file, position)
            digest.update(part)
        return digest.hexdigest()


def add_hashes(
    record: dict[str, Any], folder: Path, known: Mapping[str, str] | None = None
) -> None:
    """Add the hashes of all files and tensors in ``folder`` to its ``record``. Tensors with a
    ``known`` hash are not read.
    """
    checkpoint = open_checkpoint(folder)
    checkpoint.digests.update(known or {})
    checkpoint.model_digest()
    tensors = record.setdefault("tensors", {})
    for name, digest in checkpoint.digests.items():
        tensors.setdefault(name, {})["sha256"] = digest
    record["files"] = {name: _hash_member(folder / name) for name in _names(folder)}


def find_changed_files(folder: Path, files: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for every file of ``folder`` that is missing, changed or new compared to
    ``files`` of its record. Of weight files, only the headers are compared.
    """
    for name in sorted(set(_names(folder)) - files.keys()):
        yield f"{name}: kvfold did not write this file"
    for name, digest in files.items():
        try:
            now = _hash_member(resolve_member(folder, name, RECORD))
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
                f"tensor {name!r} in {checkpoint.info(name).file}: changed since it was written:"
                f" its SHA-256 is {digest}, not {shorten(hashes.get(name))}"
            )


def recorded_hashes(record: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The hashes of files and of tensors in a record; empty if it has none. Raises InputError if it
    has hashes of files alone.
    """
    files = record.get("files", {})
    if not isinstance(files, dict) or not all(isinstance(value, str) for value in files.values()):
        raise InputError(
            f"{RECORD}: the entry 'files' must map file names to hashes, not be {shorten(files)};"
            " convert or download the checkpoint again"
        )
    entries = record.get("tensors")
    tensors = {
        name: str(entry["sha256"])
        for name, entry in (entries.items() if isinstance(entries, dict) else ())
        if isinstance(entry, dict) and "sha256" in entry
    }
    if files and not tensors:
        raise InputError(
            f"{RECORD} has no hash of any tensor, because an older version of kvfold wrote it, so"
            " the weights cannot be compared with it; convert the model again"
        )
    return files, tensors


def _hash_member(path: Path) -> str:
    """The SHA-256 of a file; of a safetensors file, of its header, since the tensors have their
    own.
    """
    if path.suffix != ".safetensors":
        return hash_file(path)
    length = int.from_bytes(read_bytes(path, length=LENGTH_BYTES), "little")
    return hash_file(path, end=LENGTH_BYTES + min(length, MAX_HEADER))


def _names(folder: Path) -> list[str]:
    """The files below ``folder``, except the record and top-level hidden ones (``.git``)."""
    return [name for name in list_files(folder) if name != RECORD and not name.startswith(".")]
