"""SHA-256 of files, or of ranges of them: what ``kvfold.json``, ``kvfold verify`` and every ``--resume`` compare.

Shards are hashed while they are written: a thread follows the tensors in the order of the file. What was just written
is in the page cache, so that a finished output need not be read from the disk once more.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from kvfold.convert.checkpoint.shards import Shard, shard_header

_CHUNK = 1 << 20
_POLL = 0.05  # seconds: a tensor is written in less, or takes far longer


class _StoppedError(Exception):
    """Whoever wanted the hashes has gone."""


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
    """Hash the files of ``shards`` beside the block, each tensor once its name is in ``written``.

    Yields what waits for the hashes, by file; to be called when everything is written. OSError when one cannot be read.
    """
    stopped = threading.Event()
    with ThreadPoolExecutor(1, "kvfold-hash") as pool:
        hashes = pool.submit(lambda: {shard.file: _hash(folder, shard, written, stopped) for shard in shards})
        try:
            yield hashes.result
        finally:
            stopped.set()


def _hash(folder: Path, shard: Shard, written: Container[str], stopped: threading.Event) -> str:
    header = shard_header(shard)
    digest, position, buffer = hashlib.sha256(header), len(header), bytearray(_CHUNK)
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
            raise OSError(f"{path}: expected {end} bytes, found {start}")
        yield memoryview(buffer)[:count]
        start += count
