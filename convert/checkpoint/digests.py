"""SHA-256 hashes in ``kvfold.json``: of every tensor, of the headers of weight files and of other
files whole. Together they cover every byte of a checkpoint that kvfold wrote.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.headers import LENGTH_BYTES
from kvfold.convert.checkpoint.members import (
    RECORD,
    list_files,
    parse_json,
    read_bytes,
    read_member,
    read_steps,
    resolve_member,
)
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.errors import InputError, shorten


def hash_file(path: Path, start: int = 0, end: int | None = None) -> str:
    """The SHA-256 of a file, or of its bytes ``start`` to ``end``. InputError if it ends before
    that.
    """
    digest = hashlib.sha256()
    for step in read_steps(path, start, path.stat().st_size if end is None else end):
        digest.update(step)
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
    record["files"] = {name: _hash_member(folder / name) for name in _list_hashed(folder)}


def read_hashes(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The hashes of files and of tensors in the ``kvfold.json`` of ``folder``; empty without one.
    Raises InputError if it is damaged.
    """
    if not os.path.lexists(folder / RECORD):
        return {}, {}
    record = parse_json(folder / RECORD, read_member(folder, RECORD))
    files = record.get("files", {})
    tensors = record.get("tensors", {})
    try:
        hashes = {name: str(entry.get("sha256")) for name, entry in tensors.items()}
        if all(isinstance(digest, str) for digest in files.values()):
            return files, hashes
    except AttributeError:  # no dict
        pass
    raise InputError(
        f"{folder / RECORD}: 'files' and 'tensors' must map names to SHA-256 hashes; convert or"
        " download the checkpoint again"
    )


def find_changed_files(folder: Path, files: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for every file of ``folder`` that is missing, changed or new compared to
    ``files`` of its record. Of weight files, only the headers are compared.
    """
    for name in sorted(set(_list_hashed(folder)) - files.keys()):
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


def _hash_member(path: Path) -> str:
    """The SHA-256 of a file; of a safetensors file, of its header, since the tensors have their
    own.
    """
    end = None
    if path.suffix == ".safetensors":
        length = int.from_bytes(read_bytes(path, LENGTH_BYTES), "little")
        end = min(LENGTH_BYTES + length, path.stat().st_size)
    return hash_file(path, end=end)


def _list_hashed(folder: Path) -> list[str]:
    """The files below ``folder``, except the record and top-level hidden ones (``.git``)."""
    return [name for name in list_files(folder) if name != RECORD and not name.startswith(".")]
