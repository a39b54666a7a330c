"""SHA-256 of shards while they are written: a thread follows the tensors in the order of the file.

What was just written is in the page cache, so that a finished output need not be read from the disk once more.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from kvfold.convert.io.shard_plan import Shard, shard_header

_CHUNK = 1 << 20
_POLL = 0.05  # seconds: a tensor is written in less, or takes far longer


class _StoppedError(Exception):
    """Whoever wanted the hashes has gone."""


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
    with (folder / shard.file).open("rb", buffering=0) as file:
        for tensor in shard.tensors:
            while tensor.name not in written:
                if stopped.wait(_POLL):
                    raise _StoppedError
            end = position + tensor.nbytes
            while position < end:
                if stopped.is_set():
                    raise _StoppedError
                count = os.preadv(file.fileno(), [memoryview(buffer)[: end - position]], position)
                if count == 0:
                    raise OSError(f"{folder / shard.file}: expected {end} bytes, found {position}")
                digest.update(memoryview(buffer)[:count])
                position += count
    return digest.hexdigest()
