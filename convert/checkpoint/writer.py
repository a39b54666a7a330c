"""Write a checkpoint's shards. The plan fixes every tensor's place in advance, so tensors can be
written in any order.

Tensors that no transform changes are copied as bytes, without decoding, in runs as long as the plan
allows.
"""

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.convert.checkpoint.files import (
    copy_range,
    drop_cached,
    open_source,
    write_all,
    write_file,
)
from kvfold.convert.checkpoint.folder import INDEX
from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TensorInfo, tensor_bytes
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.shards import Shard, TensorPlace, tensor_places
from kvfold.convert.errors import KvfoldError

if TYPE_CHECKING:
    import torch

OnBytes = Callable[[int], None]  # called with the number of source bytes of every step
OnCopied = Callable[
    [Path, int, int], None
]  # called with a source file and the bytes of it that were copied
_CAST_ELEMENTS = 8 << 20


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write model.safetensors.index.json for all ``shards`` of a checkpoint; a single shard does
    not need an index.
    """
    if len(shards) < 2:
        return
    weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(folder / INDEX, json.dumps(index, indent=2) + "\n")


def is_laid_out(path: Path, shard: Shard) -> bool:
    """True if the file at ``path`` has the size and header of ``shard``, as a resumed run requires."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return (
            os.fstat(file).st_size == shard.nbytes
            and os.pread(file, len(shard.header), 0) == shard.header
        )
    finally:
        os.close(file)


class ShardWriter:
    """Writes the shards of one output folder. Does not need closing: no file stays open between two
    writes.

    The constructor creates every file at its final size (sparse), with its header; tensors may then
    be written in any order. ``shards`` are those that this process writes. To continue a killed
    run, whose files are in the folder, ``resume_written`` names their tensors that it wrote. Raises
    KvfoldError if the plan contains a tensor twice or contradicts resumed files.
    """

    def __init__(
        self, folder: Path, shards: Sequence[Shard], resume_written: Iterable[str] | None = None
    ) -> None:
        self._folder, self._shards = folder, tuple(shards)
        self._places = tensor_places(self._shards)
        self.written = set(resume_written or ())
        self._copying: Future[None] | None = None
        if unknown := sorted(self.written - set(self._places)):
            raise KvfoldError(
                f"{folder}: resumed tensor {unknown[0]!r} is not in this plan; start over"
            )
        for shard in self._shards:
            if resume_written is None:
                with self._opened(shard.file, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
                    os.ftruncate(file, shard.nbytes)
                    write_all(file, memoryview(shard.header), 0)
            elif not is_laid_out(folder / shard.file, shard):
                raise KvfoldError(f"{folder / shard.file} does not match this plan; start over")
        # a sparse file holds zeros already
        self.written.update(
            name for name, place in self._places.items() if place.tensor.source == ()
        )

    def write_own(self, tensors: Mapping[str, "torch.Tensor"]) -> int:
        """Write the computed ``tensors`` of this process's shards, cast as planned, and return
        their bytes.

        Raises InputError if a value overflows, KvfoldError if a shape is not as planned.
        """
        from kvfold.convert.checkpoint.tensors import (
            cast_chunk,
            refuse_non_finite,
            tensor_memory,
            torch_dtype,
        )

        if self._copying is not None and self._copying.done():
            # a disk's failure must not surface only after hours of computing
            self._copying.result()
        own = [self._places[name] for name in tensors if name in self._places]
        for place in own:
            name = place.tensor.name
            shape = place.tensor.shape
            tensor = tensors[place.tensor.name]
            if tensor.shape != shape:
                raise KvfoldError(
                    f"tensor {name!r} has shape {tuple(tensor.shape)}, but the plan requires"
                    f" {shape}"
                )
            stored = cast_chunk(tensor, torch_dtype(place.tensor.dtype), name).cpu().contiguous()
            refuse_non_finite(
                stored,
                f"converted tensor {name!r}",
                ", computed from weights that are not finite or far too large",
            )
            with self._opened(place.shard) as file:
                write_all(file, tensor_memory(stored), place.start)
            self.written.add(name)
        return sum(place.tensor.nbytes for place in own)

    def copy_rest(
        self,
        checkpoint: Checkpoint,
        progress: OnBytes = lambda count: None,
        copied: OnCopied = drop_cached,
    ) -> None:
        """Copy every tensor that has a source and is not written yet, in the order of the source's
        bytes.
        """
        rest = [place for name, place in self._places.items() if name not in self.written]
        moves = [move for place in rest for move in _moves(place, checkpoint)]
        # a tensor of several sources is written when the last of its parts is
        left = Counter(move.place.tensor.name for move in moves)
        for run in _runs(moves):
            with self._opened(run[0].place.shard) as target:
                _copy_run(run, checkpoint, target, progress, copied)
            left.subtract(move.place.tensor.name for move in run)
            self.written.update(name for move in run if left[name := move.place.tensor.name] == 0)

    @contextmanager
    def copying_rest(
        self,
        checkpoint: Checkpoint,
        progress: OnBytes = lambda count: None,
        copied: OnCopied = drop_cached,
    ) -> Iterator[None]:
        """Run ``copy_rest`` in a thread while the block reads the checkpoint and writes the tensors
        that it computes.

        An error in the block stops the copy; an error in the copy is raised by the next
        ``write_own`` or when the block ends. If the source has tensors that are created in memory
        (legacy ones), the copy runs after the block.
        """
        if any(checkpoint.raw_path(info) is None for info in checkpoint.tensors.values()):
            yield
            self.copy_rest(checkpoint, progress, copied)
            return
        # copying waits for the disk, computing for the processor: together they take little longer
        # than the slower one
        stopped = threading.Event()

        def step(count: int) -> None:
            if stopped.is_set():
                raise KvfoldError("the copy was stopped because the computation beside it failed")
            progress(count)

        def copy() -> None:
            self.copy_rest(checkpoint, step, copied)
            self.sync()  # the disk is at work before the last tensor is computed

        with ThreadPoolExecutor(1, "kvfold-copy") as pool:
            self._copying = pool.submit(copy)
            try:
                yield
            except BaseException:
                stopped.set()
                raise
            self._copying.result()

    def sync(self) -> None:
        """Make all writes so far survive a machine crash. Call this before recording progress for a
        resume.
        """
        for shard in self._shards:
            with self._opened(shard.file) as file:
                os.fsync(file)

    def finish(self) -> None:
        """Sync all files. Raises KvfoldError with the tensors that were not written, if any."""
        if missing := [
            f"tensor {name!r} was not written" for name in self._places if name not in self.written
        ]:
            raise KvfoldError(
                f"{self._folder}: {len(missing)} of {len(self._places)} tensors are missing",
                missing,
            )
        self.sync()

    # A file is opened for each write: a model may have more files than a process may hold open.
    @contextmanager
    def _opened(self, shard: str, flags: int = os.O_RDWR) -> Iterator[int]:
        """Open a shard's file. Any OSError, even in the block, becomes a KvfoldError that names the
        file.
        """
        path = self._folder / shard
        try:
            # a link in its place must not lead what is written out of the folder
            file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                yield file
            finally:
                os.close(file)
        except OSError as error:
            raise KvfoldError(f"{path} cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True)
class _Move:
    """A source tensor and the target bytes ``start`` .. ``end`` to write it to: all of a ``place``,
    or a part of it.
    """

    place: TensorPlace
    info: TensorInfo
    start: int
    end: int
    raw: (
        Path | None
    )  # the file whose bytes are copied; none if the tensor is cast, or made in memory


def _moves(place: TensorPlace, checkpoint: Checkpoint) -> list[_Move]:
    """List one move per source of a tensor: a single source fills all of it, several fill one part
    each, in order.
    """
    tensor = place.tensor
    moves = []
    start = place.start
    for name in tensor.sources:
        info = checkpoint.info(name)
        cast = info.dtype != tensor.dtype
        whole = info.shape == tensor.shape or len(tensor.sources) > 1
        if not whole or (cast and not {info.dtype, tensor.dtype} <= FLOAT_DTYPES):
            actual = f"{info.dtype} {info.shape} in {info.file}"
            planned = f"tensor {tensor.name!r} as {tensor.dtype} {tensor.shape}"
            raise KvfoldError(f"{planned} cannot be copied from {actual}")
        end = start + tensor_bytes(tensor.dtype, info.shape)
        moves.append(_Move(place, info, start, end, None if cast else checkpoint.raw_path(info)))
        start = end
    if start != place.end and moves:
        needed = place.end - place.start
        found = start - place.start
        raise KvfoldError(
            f"tensor {tensor.name!r} needs {needed} bytes in all, but its sources have {found}"
        )
    return moves


def _runs(moves: Iterable[_Move]) -> Iterator[list[_Move]]:
    """Sort ``moves`` by the source's bytes, and yield raw moves that are adjacent in source and
    target as one run.
    """
    run: list[_Move] = []
    # in the source's order: disks read ahead, and a cold page is read once
    for move in sorted(moves, key=lambda move: (move.info.file, move.info.start)):
        if run:
            last = run[-1]
            same_files = (last.info.file, last.place.shard) == (move.info.file, move.place.shard)
            adjacent = last.info.end == move.info.start and last.end == move.start
            if not (same_files and adjacent and last.raw is not None and move.raw is not None):
                yield run
                run = []
        run.append(move)
    if run:
        yield run


def _copy_run(
    run: Sequence[_Move], checkpoint: Checkpoint, target: int, progress: OnBytes, copied: OnCopied
) -> None:
    """Copy a run to the open shard ``target``: as bytes in one piece, or cast in chunks to limit
    memory use.
    """
    first = run[0]
    end = run[-1].info.end
    raw = run[0].raw
    if raw is not None:

        def step(start: int, stop: int) -> None:
            progress(stop - start)
            copied(raw, start, stop)

        with open_source(raw) as source:
            copy_range(source, first.info.start, end, target, first.start, step)
        return
    from kvfold.convert.checkpoint.tensors import cast_chunk, tensor_memory, torch_dtype

    (move,) = run
    dtype = torch_dtype(move.place.tensor.dtype)
    position = move.start
    for chunk in checkpoint.chunks(move.info.name, _CAST_ELEMENTS):
        data = tensor_memory(
            cast_chunk(chunk, dtype, move.info.name) if chunk.dtype != dtype else chunk
        )
        write_all(target, data, position)
        position += len(data)
        progress(chunk.numel() * chunk.element_size())
