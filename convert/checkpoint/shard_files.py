"""The files of an output folder: shards of their final size before the first tensor, the index, small synced files."""

import os
from collections.abc import Sequence
from pathlib import Path

from kvfold.convert.checkpoint.copying import write_all
from kvfold.convert.checkpoint.folder import INDEX
from kvfold.convert.checkpoint.shards import Shard, shard_header, shard_index
from kvfold.convert.checkpoint.swap import sync_path
from kvfold.convert.errors import KvfoldError


def lay_out(file: int, path: Path, shard: Shard, resumed: bool) -> None:
    """Give a new shard its final size and its header; a resumed one must have both."""
    header = shard_header(shard)
    size = len(header) + sum(tensor.nbytes for tensor in shard.tensors)
    if not resumed:
        os.ftruncate(file, size)
        write_all(file, memoryview(header), 0)
    elif not _has_layout(file, header, size):
        raise KvfoldError(f"{path}: expected the shard of this plan to resume, found another; start over")


def is_laid_out(path: Path, shard: Shard) -> bool:
    """Whether the file at ``path`` has the size and the header of ``shard``, which a resumed run needs."""
    header = shard_header(shard)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return _has_layout(file, header, len(header) + sum(tensor.nbytes for tensor in shard.tensors))
    finally:
        os.close(file)


def _has_layout(file: int, header: bytes, size: int) -> bool:
    return os.fstat(file).st_size == size and os.pread(file, len(header), 0) == header


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the index of all ``shards`` of a checkpoint; a single one needs none."""
    if len(shards) > 1:
        write_synced(folder / INDEX, shard_index(shards))


def write_synced(path: Path, data: bytes) -> None:
    """Write a small file and sync it. OSError names the file."""
    write_file(path, data)
    sync_path(path)


def write_file(path: Path, content: bytes | str) -> None:
    """Write a small file, text as UTF-8. OSError names the file, which the system's own does not for a full disk."""
    rest = memoryview(content.encode() if isinstance(content, str) else content)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(file)
