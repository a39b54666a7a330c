"""Assign output tensors to weight files (shards), and write them in any order: the file and byte
offset of every tensor are fixed before the first byte is written.

Tensors that no transform changes are copied as bytes, without decoding. The SHA-256 of every tensor
is computed while its bytes pass.
"""

import hashlib
import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.convert.checkpoint.atomic import open_file, sync_path, write_bytes_at, write_small_file
from kvfold.convert.checkpoint.files import INDEX, SINGLE
from kvfold.convert.checkpoint.headers import DTYPES, count_tensor_bytes
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import KvfoldError

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 8
# More bytes than a header takes for a tensor besides its name, and for all else
_ENTRY_BYTES = 200
# Threads that copy and hash: one of them waits for the disk while the other one hashes
_THREADS = 2
# Seconds after which a thread that imports torch gives the interpreter's lock to those that copy.
# Python's 5 ms are many times what they need for a step.
_SWITCH_INTERVAL = 0.0005

# The unsigned integers of a float's size, and the bits of its infinity, which NaN has too
_INFINITY = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F800000),
    "F64": ("<u8", 0x7FF << 52),
}


@dataclass(frozen=True)
class PlannedTensor:
    """The name, safetensors dtype and shape of a tensor that a conversion will write, and the
    source tensors that it copies.

    ``source`` names the source tensor whose bytes are copied, or cast if the dtypes differ. Several
    names mean that these tensors are concatenated, such as experts stored one by one; ``()`` means
    a tensor of zeros, and None a tensor computed by a transform.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str | tuple[str, ...] | None

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the source tensors that are copied, in the order in which they are
        concatenated; empty for a computed tensor or one of zeros.
        """
        return (self.source,) if isinstance(self.source, str) else self.source or ()

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return count_tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Shard:
    """One safetensors file of the output and its tensors, in byte order."""

    file: str
    tensors: tuple[PlannedTensor, ...]

    @cached_property
    def header(self) -> bytes:
        """The bytes of the file before its first tensor: the header's length and its JSON, padded
        with spaces to a multiple of 8 bytes.
        """
        entries: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
        position = 0
        for tensor in self.tensors:
            offsets = [position, position + tensor.nbytes]
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": offsets,
            }
            position += tensor.nbytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        return struct.pack("<Q", len(header)) + header

    @property
    def nbytes(self) -> int:
        """The size of the whole file in bytes, header included."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class TensorLocation:
    """Where an output tensor is stored: from byte ``start`` of ``file`` on."""

    tensor: PlannedTensor
    file: Path
    start: int


def assign_shards(tensors: Iterable[PlannedTensor], max_bytes: int) -> list[Shard]:
    """Distribute ``tensors`` over weight files (shards) in the given order, at most ``max_bytes``
    per file. A tensor larger than that gets a file of its own.
    """
    groups: list[list[PlannedTensor]] = []
    used = 0
    for tensor in tensors:
        cost = tensor.nbytes + len(json.dumps(tensor.name)) + _ENTRY_BYTES
        if not groups or used + cost > max_bytes:
            groups.append([])
            used = _ENTRY_BYTES
        groups[-1].append(tensor)
        used += cost
    shards = []
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        # wider dtypes first: every tensor then begins at a multiple of its item size, as memory
        # maps need
        group.sort(key=lambda tensor: (-DTYPES[tensor.dtype]["bits"], tensor.source is None))
        shards.append(Shard(SINGLE if len(groups) == 1 else name, tuple(group)))
    return shards


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write model.safetensors.index.json for ``shards``, which maps each tensor to its file. A
    checkpoint with a single weight file gets no index.
    """
    if len(shards) < 2:
        return
    weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_small_file(folder / INDEX, json.dumps(index, indent=2) + "\n")


def has_shard_header(path: Path, shard: Shard) -> bool:
    """True if the file at ``path`` has the size and the header planned for ``shard``, so that a
    resumed run can continue to fill it.
    """
    try:
        with open_file(path, os.O_RDONLY) as file:
            size = os.fstat(file).st_size
            return size == shard.nbytes and os.pread(file, len(shard.header), 0) == shard.header
    except OSError:
        return False


def has_non_finite(data: memoryview, dtype: str) -> bool:
    """True if ``data``, elements of the safetensors ``dtype`` as bytes, has NaN or infinity. Takes
    a sixth of the time of their SHA-256.
    """
    if dtype not in _INFINITY:
        return False
    import numpy

    kind, infinity = _INFINITY[dtype]
    exponents = numpy.frombuffer(data, kind) & infinity
    return bool(exponents.max(initial=0) == infinity)


class ShardWriter:
    """Writes tensors into the weight files (shards) of an output folder, in any order, and computes
    their SHA-256. It keeps no file open, so it need not be closed.

    A file is opened for each write: a model may have more files than a process may hold open.

    The constructor creates every file at its final size (sparse), with its header; tensors may then
    be written in any order. To continue a killed run, whose files are in the folder,
    ``resume_written`` names their tensors that it wrote.
    ``written`` has the names of the tensors in the files, and ``digests`` the SHA-256 of each that
    this object wrote; ``non_finite`` has the names of copied tensors with NaN or infinite elements.
    An OSError names the file; no link is followed out of the folder.
    """

    def __init__(
        self, folder: Path, shards: Sequence[Shard], resume_written: Iterable[str] | None = None
    ) -> None:
        """Create the weight files of ``shards`` in ``folder`` at their final sizes, unless a killed
        run has created them: ``resume_written`` then names the tensors that it wrote.
        """
        self._folder = folder
        self._shards = tuple(shards)
        self._locations: dict[str, TensorLocation] = {}
        for shard in self._shards:
            start = len(shard.header)
            for tensor in shard.tensors:
                self._locations[tensor.name] = TensorLocation(tensor, folder / shard.file, start)
                start += tensor.nbytes
        self.written = set(resume_written or ())
        self.digests: dict[str, str] = {}
        self.non_finite: set[str] = set()
        self._copies: list[Future[None]] = []
        self._progress: Callable[[int], object] = lambda _: None
        self._stopped = threading.Event()
        for shard in self._shards if resume_written is None else ():
            with open_file(folder / shard.file, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
                os.ftruncate(file, shard.nbytes)
                write_bytes_at(file, memoryview(shard.header), 0)

    def write(self, tensors: Mapping[str, "torch.Tensor"]) -> int:
        """Write the computed ``tensors`` into their files, cast to the planned dtypes. Returns the
        number of bytes written.

        Raises InputError if a value overflows, KvfoldError if a shape is not as planned.
        """
        from kvfold.convert.checkpoint.tensors import (
            TORCH_DTYPES,
            cast_floats,
            refuse_non_finite,
            view_as_bytes,
        )

        for copy in self._copies:
            if copy.done():  # a disk's failure must not surface only after hours of computing
                copy.result()
        count = 0
        for name, tensor in tensors.items():
            location = self._locations[name]
            if tensor.shape != location.tensor.shape:
                raise KvfoldError(
                    f"tensor {name!r} has shape {tuple(tensor.shape)}, but the plan requires"
                    f" {location.tensor.shape}; please report it"
                )
            stored = (
                cast_floats(tensor, TORCH_DTYPES[location.tensor.dtype], name).cpu().contiguous()
            )
            refuse_non_finite(
                stored,
                f"converted tensor {name!r}",
                ", computed from weights that are not finite or far too large",
            )
            data = view_as_bytes(stored)
            with open_file(location.file, os.O_RDWR) as file:
                write_bytes_at(file, data, location.start)
            self.digests[name] = hashlib.sha256(data).hexdigest()
            self.written.add(name)
            count += len(data)
        self._progress(count)
        return count

    @contextmanager
    def copy_source_tensors(
        self, checkpoint: Checkpoint, progress: Callable[[int], object]
    ) -> Iterator[None]:
        """Copy every tensor that is taken unchanged from ``checkpoint``, in background threads
        while the with-block computes and writes the others. All copies are complete when the block
        ends.

        ``progress`` is called with the bytes of every step, in the block too. An error in the block
        stops the copy; an error in the copy is raised by the next ``write`` or when the block ends.
        Legacy files are opened one at a time, and so copied after the block.
        """
        self._progress = progress
        rest = [
            location
            for name, location in self._locations.items()
            if name not in self.written and location.tensor.source is not None
        ]
        legacy = checkpoint.legacy
        order = {name: position for position, name in enumerate(checkpoint.tensors)}
        rest.sort(key=lambda location: [order[name] for name in location.tensor.sources])
        if legacy:
            yield
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL)
        # copying waits for the disk, computing for the processor: together they take little longer
        # than the slower one
        with ThreadPoolExecutor(1 if legacy else _THREADS, "kvfold-copy") as pool:
            self._copies = [
                pool.submit(self._copy_tensor, location, checkpoint) for location in rest
            ]
            # the disk is at work before the last tensor is computed
            self._copies.append(pool.submit(self.sync))
            try:
                if not legacy:
                    yield
                for copy in self._copies:
                    copy.result()
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            finally:
                sys.setswitchinterval(interval)

    def _copy_tensor(self, location: TensorLocation, checkpoint: Checkpoint) -> None:
        """Copy the bytes of one output tensor from its source tensors to its ``location``, and
        store their SHA-256.
        """
        tensor = location.tensor
        # Reading hashes the bytes; what is cast or joined has a hash of its own.
        copied = checkpoint.tensors.get(str(tensor.source))
        if copied is not None and copied.dtype != tensor.dtype:
            copied = None
        digest = hashlib.sha256()
        position = location.start
        steps = (
            step for name in tensor.sources for step in checkpoint.read_bytes_as(name, tensor.dtype)
        )
        with open_file(location.file, os.O_RDWR) as file:
            for data in steps if tensor.sources else [memoryview(bytes(tensor.nbytes))]:
                if self._stopped.is_set():
                    return
                if copied is None:
                    digest.update(data)
                write_bytes_at(file, data, position)
                if has_non_finite(data, tensor.dtype):
                    self.non_finite.add(tensor.name)
                position += len(data)
                self._progress(len(data))
        if (size := position - location.start) != tensor.nbytes:
            raise KvfoldError(
                f"tensor {tensor.name!r} needs {tensor.nbytes} bytes, but its source tensors have"
                f" {size} bytes; please report it"
            )
        self.digests[tensor.name] = (
            digest.hexdigest() if copied is None else checkpoint.digests[copied.name]
        )
        self.written.add(tensor.name)

    def sync(self) -> None:
        """Flush all weight files to disk, so that the tensors written so far survive a power
        failure. Call this before recording a layer as finished.
        """
        for shard in self._shards:
            sync_path(self._folder / shard.file)

    def finish(self) -> None:
        """Check that every tensor was written, then flush all weight files to disk. Raises
        KvfoldError with the names of the missing tensors.
        """
        if missing := [name for name in self._locations if name not in self.written]:
            raise KvfoldError(
                f"{len(missing)} planned tensors were not written to {self._folder}; please report"
                " it",
                missing,
            )
        self.sync()
