"""SHA-256 of files and of byte ranges in them, for ``kvfold.json``, ``kvfold verify`` and
interrupted runs.
"""

import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from queue import SimpleQueue

from kvfold.convert.checkpoint.files import AT_ONCE, drop_cached, open_source, read_parts
from kvfold.convert.checkpoint.folder import RECORD, list_files, resolve_member
from kvfold.convert.checkpoint.shards import Shard
from kvfold.convert.errors import InputError, short

_THREADS = 4  # a disk is slower than so many processors
_POLL = 0.05  # seconds: a tensor is written in less, or takes far longer


def file_sha256(path: Path, ranges: Iterable[tuple[int, int]] | None = None) -> str:
    """The SHA-256 of a file, or of the bytes in each of ``ranges`` in turn. InputError if it ends
    before that.
    """
    with open_source(path) as file:
        if ranges is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        for start, end in ranges:
            for part in read_parts(file, start, end):
                digest.update(part)
        return digest.hexdigest()


def _update(digest: "hashlib._Hash", file: FileIO, start: int, end: int) -> None:
    """Add the bytes ``start`` to ``end`` of an open file to ``digest``. Nothing else may shorten
    the file meanwhile.
    """
    first = start - start % mmap.ALLOCATIONGRANULARITY
    try:
        # Mapped: read through a buffer, beside a copy, they take 1.1 CPU seconds per GB instead of
        # 0.7 (EPYC with SHA-NI, 2026-11-24).
        with (
            mmap.mmap(file.fileno(), end - first, access=mmap.ACCESS_READ, offset=first) as mapped,
            memoryview(mapped)[start - first :] as part,
        ):
            digest.update(part)
    except (
        OSError,
        ValueError,
    ):  # a file system without maps, too little memory for one, or a file that was cut short
        for part in read_parts(file, start, end):
            digest.update(part)


@contextmanager
def hashing(
    folder: Path, shards: Sequence[Shard], written: Container[str]
) -> Iterator[Callable[[], dict[str, str]]]:
    """Hash the files of ``shards`` while the block writes them, each tensor once its name is in
    ``written``.

    Yields a function that waits for the hashes and returns them by file name; call it after
    everything is written. It raises InputError if a file cannot be read.
    """
    stopped = threading.Event()

    def digest(shard: Shard) -> str:
        hashed = hashlib.sha256(shard.header)
        position = len(shard.header)
        with open_source(folder / shard.file) as file:
            for tensor in shard.tensors:
                while tensor.name not in written:
                    if stopped.wait(_POLL):  # nobody waits for the hashes any more
                        raise CancelledError
                end = position + tensor.nbytes
                while position < end:
                    if stopped.is_set():
                        raise CancelledError
                    part_end = min(position + AT_ONCE, end)
                    _update(hashed, file, position, part_end)
                    position = part_end
        return hashed.hexdigest()

    # what was just written is in the page cache: a finished output need not be read from the disk
    # once more
    with ThreadPoolExecutor(1, "kvfold-hash") as pool:
        hashes = pool.submit(lambda: {shard.file: digest(shard) for shard in shards})
        try:
            yield hashes.result
        finally:
            stopped.set()


@contextmanager
def hashing_source(
    files: Iterable[Path], found: dict[Path, str], copied_first: bool
) -> Iterator[Callable[[Path, int, int], None]]:
    """Hash ``files`` in a thread while the block reads them, and add the hashes to ``found`` when
    it ends.

    Yields a function for the bytes of a file that the block has copied, in the order of the file:
    they are hashed and dropped while they are still in memory. With ``copied_first``, the rest
    waits for the end of the block.
    """
    copies: SimpleQueue[tuple[Path, int, int] | None] = SimpleQueue()
    stopped = threading.Event()
    digests = {path: hashlib.sha256() for path in files}
    ends = dict[Path, int]()

    def update(path: Path, end: int | None) -> None:
        # Not mapped: a program that cut the file short meanwhile would kill this one.
        with open_source(path) as file:
            start = ends.get(path, 0)
            ends[path] = max(start, os.fstat(file.fileno()).st_size if end is None else end)
            for part in read_parts(file, start, ends[path], AT_ONCE // 8):
                if stopped.is_set():
                    raise CancelledError
                digests[path].update(part)

    def work() -> None:
        for path, start, end in iter(copies.get, None) if copied_first else ():
            if path in digests:
                update(path, end)
            drop_cached(path, start, end)
        for path in digests:
            update(path, None)

    with ThreadPoolExecutor(1, "kvfold-hash-source") as pool:
        hashed = pool.submit(work)
        try:
            yield lambda path, start, end: copies.put((path, start, end))
            copies.put(None)
            hashed.result()
        finally:
            stopped.set()
            copies.put(None)
    found.update({path: digest.hexdigest() for path, digest in digests.items()})


def file_hashes(
    folder: Path, record: str = RECORD, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The SHA-256 of every file below ``folder`` by relative path, except ``record``. Those
    ``known`` are not read.
    """
    names = _names(folder, record)
    known = known or {}
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        hashes = pool.map(
            lambda name: known[name] if name in known else file_sha256(folder / name), names
        )
        return dict(zip(names, hashes, strict=True))


def file_problems(folder: Path, expected: Mapping[str, str], record: str = RECORD) -> Iterator[str]:
    """Yield a line for every file that is missing, changed or new compared to ``expected``, made by
    ``file_hashes``.
    """
    for name in sorted(set(_names(folder, record)) - expected.keys()):
        yield f"{name}: kvfold did not write this file"
    for name, digest in expected.items():
        try:
            found = file_sha256(resolve_member(folder, name, record))
        except InputError as error:
            yield error.message
        else:
            if found != digest:
                yield (
                    f"{name}: changed since it was written: its SHA-256 is {found}, not"
                    f" {short(digest)}"
                )


def _names(folder: Path, record: str) -> list[str]:
    """The files below ``folder``, except ``record`` and top-level hidden ones (``.git``)."""
    return [name for name in list_files(folder) if name != record and not name.startswith(".")]
