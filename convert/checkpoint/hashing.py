"""SHA-256 of files and of ranges of them, for ``kvfold.json``, ``kvfold verify`` and ``--resume``."""

import hashlib
import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from kvfold.convert.checkpoint.folder import RECORD, resolve_member
from kvfold.convert.checkpoint.shards import Shard
from kvfold.convert.errors import InputError, short

_CHUNK = 1 << 20
_THREADS = 4  # a disk is slower than so many processors
_POLL = 0.05  # seconds: a tensor is written in less, or takes far longer


class _StoppedError(Exception):
    """Nobody waits for the hashes any more."""


def file_sha256(path: Path, ranges: Iterable[tuple[int, int]] | None = None) -> str:
    """The SHA-256 of a file, or of its bytes from start to end of each of ``ranges`` in turn.

    OSError when it cannot be read, or ends before a range does.
    """
    with path.open("rb", buffering=0) as file:
        if ranges is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
        for start, end in ranges:
            for part in _read(file, path, start, end, buffer):
                digest.update(part)
        return digest.hexdigest()


@contextmanager
def hashing(folder: Path, shards: Sequence[Shard], written: Container[str]) -> Iterator[Callable[[], dict[str, str]]]:
    """Hash the files of ``shards`` while the block writes them, each tensor once its name is in ``written``.

    Yields a function that waits for the hashes and returns them by file; call it when everything is written. It raises
    OSError if a file cannot be read.
    """
    # what was just written is in the page cache: a finished output need not be read from the disk once more
    stopped = threading.Event()
    with ThreadPoolExecutor(1, "kvfold-hash") as pool:
        hashes = pool.submit(lambda: {shard.file: _hash(folder, shard, written, stopped) for shard in shards})
        try:
            yield hashes.result
        finally:
            stopped.set()


def _hash(folder: Path, shard: Shard, written: Container[str], stopped: threading.Event) -> str:
    digest, position, buffer = hashlib.sha256(shard.header), len(shard.header), bytearray(_CHUNK)
    path = folder / shard.file
    with path.open("rb", buffering=0) as file:
        for tensor in shard.tensors:
            while tensor.name not in written:
                if stopped.wait(_POLL):
                    raise _StoppedError
            for part in _read(file, path, position, position + tensor.nbytes, buffer):
                if stopped.is_set():
                    raise _StoppedError
                digest.update(part)
            position += tensor.nbytes
    return digest.hexdigest()


def _read(file: FileIO, path: Path, start: int, end: int, buffer: bytearray) -> Iterator[memoryview]:
    """The bytes of a file from ``start`` to ``end``, in parts that lie in ``buffer`` until the next."""
    while start < end:
        count = os.preadv(file.fileno(), [memoryview(buffer)[: end - start]], start)
        if count == 0:
            raise OSError(f"{path} ends at byte {start}, before {end}")
        yield memoryview(buffer)[:count]
        start += count


def file_hashes(folder: Path, record: str = RECORD, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """The SHA-256 of every file below ``folder`` by its path there, but for ``record``, which will hold them.

    Files whose hashes are ``known`` are not read.
    """
    names, known = _names(folder, record), known or {}
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        hashes = pool.map(lambda name: known[name] if name in known else file_sha256(folder / name), names)
        return dict(zip(names, hashes, strict=True))


def file_problems(folder: Path, expected: Mapping[str, str], record: str = RECORD) -> Iterator[str]:
    """A line for every file that is missing, changed or new since ``file_hashes`` gave ``expected``."""
    for name in sorted(set(_names(folder, record)) - expected.keys()):
        yield f"{name}: not a file that was written"
    for name, digest in expected.items():
        try:
            found = file_sha256(resolve_member(folder, name))
        except InputError as error:
            yield error.message
        else:
            if found != digest:
                yield f"{name}: changed since it was written: its SHA-256 is {found}, not {short(digest)}"


def _names(folder: Path, record: str) -> list[str]:
    """The files below ``folder``, without ``record`` and without what is hidden at its top, such as ``.git``."""
    files = (Path(root, name).relative_to(folder) for root, _, names in os.walk(folder) for name in names)
    return sorted(str(file) for file in files if str(file) != record and not file.parts[0].startswith("."))
