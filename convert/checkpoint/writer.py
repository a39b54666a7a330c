"""Write a checkpoint's shards: the plan fixes every tensor's place before the first byte, so that any order will do.

Tensors that no transform touches go from file to file as bytes, never decoded, in runs as long as the plan allows.
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

from kvfold.convert.checkpoint.files import copy_range, open_source, write_all, write_file
from kvfold.convert.checkpoint.folder import INDEX
from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TensorInfo, tensor_bytes
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.shards import Shard, TensorPlace, tensor_places
from kvfold.convert.errors import KvfoldError

if TYPE_CHECKING:
    import torch

OnBytes = Callable[[int], None]  # called with the number of source bytes of every step
_CAST_ELEMENTS = 8 << 20


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write model.safetensors.index.json for all ``shards`` of a checkpoint; a single one needs none."""
    if len(shards) < 2:
        return
    weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(folder / INDEX, json.dumps(index, indent=2) + "\n")


def is_laid_out(path: Path, shard: Shard) -> bool:
    """True if the file at ``path`` has the size and the header of ``shard``, which a resumed run needs."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return os.fstat(file).st_size == shard.nbytes and os.pread(file, len(shard.header), 0) == shard.header
    finally:
        os.close(file)


class ShardWriter:
    """Writes the shards of one output folder. Nothing is to be closed: no file is open between two writes.

    The constructor lays out every file at its final size (sparse) with its header. Tensors may then come in any order.
    ``shards`` are the ones that this process writes; ``resume_written`` names the tensors that a killed run has written
    to the same folder. KvfoldError if the plan names a tensor twice, or resumed files do not follow this plan.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], resume_written: Iterable[str] = ()) -> None:
        self._folder, self._shards = folder, tuple(shards)
        self._places = tensor_places(self._shards)
        self.written = set(resume_written)
        self._copying: Future[None] | None = None
        if unknown := sorted(self.written - set(self._places)):
            raise KvfoldError(f"{folder}: this plan has no tensor {unknown[0]!r} to resume; start over")
        for shard in self._shards:
            if not self.written:
                with self._opened(shard.file, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
                    os.ftruncate(file, shard.nbytes)
                    write_all(file, memoryview(shard.header), 0)
            elif not is_laid_out(folder / shard.file, shard):
                raise KvfoldError(f"{folder / shard.file} is not the shard of this plan; start over")
        # a sparse file holds zeros already
        self.written.update(name for name, place in self._places.items() if place.tensor.source == ())

    def write_own(self, tensors: Mapping[str, "torch.Tensor"]) -> int:
        """Write those of the computed ``tensors`` that lie in this process's shards, cast to their planned dtypes.

        Returns their bytes. InputError if one overflows, KvfoldError if the plan has another shape.
        """
        from kvfold.convert.checkpoint.tensors import cast_chunk, tensor_memory, torch_dtype

        if self._copying is not None and self._copying.done():
            self._copying.result()  # a disk's failure must not surface only after hours of computing
        own = [self._places[name] for name in tensors if name in self._places]
        for place in own:
            name, shape, tensor = place.tensor.name, place.tensor.shape, tensors[place.tensor.name]
            if tensor.shape != shape:
                raise KvfoldError(f"tensor {name!r} of shape {tuple(tensor.shape)} must have {shape}")
            stored = cast_chunk(tensor, torch_dtype(place.tensor.dtype), name).cpu().contiguous()
            with self._opened(place.shard) as file:
                write_all(file, tensor_memory(stored), place.start)
            self.written.add(name)
        return sum(place.tensor.nbytes for place in own)

    def copy_rest(self, checkpoint: Checkpoint, progress: OnBytes = lambda count: None) -> None:
        """Copy every tensor that has a source and is not written yet, in the order of the source's bytes."""
        rest = [place for name, place in self._places.items() if name not in self.written]
        moves = [move for place in rest if not place.tensor.computed for move in _moves(place, checkpoint)]
        # a tensor of several sources is written when the last of its parts is
        left = Counter(move.place.tensor.name for move in moves)
        for run in _runs(moves):
            with self._opened(run[0].place.shard) as target:
                _copy_run(run, checkpoint, target, progress)
            left.subtract(move.place.tensor.name for move in run)
            self.written.update(name for move in run if left[name := move.place.tensor.name] == 0)

    @contextmanager
    def copying_rest(self, checkpoint: Checkpoint, progress: OnBytes = lambda count: None) -> Iterator[None]:
        """``copy_rest`` in a thread while the block reads the checkpoint and writes what it computes.

        The block's error stops the copy; the copy's is raised by the next ``write`` or when the block ends.
        Sources with tensors that are made in memory (of legacy files, or dequantized) are copied after the block.
        """
        if any(checkpoint.raw_path(info) is None for info in checkpoint.tensors.values()):
            yield
            self.copy_rest(checkpoint, progress)
            return
        # copying waits for the disk, computing for the processor: together they take little longer than the slower one
        stopped = threading.Event()

        def step(count: int) -> None:
            if stopped.is_set():
                raise KvfoldError("the copy was stopped: what ran beside it failed")
            progress(count)

        with ThreadPoolExecutor(1, "kvfold-copy") as pool:
            self._copying = pool.submit(self.copy_rest, checkpoint, step)
            try:
                yield
            except BaseException:
                stopped.set()
                raise
            self._copying.result()

    def sync(self) -> None:
        """Make what is written so far survive a crash of the machine; call it before noting progress for a resume."""
        for shard in self._shards:
            with self._opened(shard.file) as file:
                os.fsync(file)

    def finish(self) -> None:
        """Sync all files. KvfoldError lists the tensors that were not written, if any."""
        if missing := [f"tensor {name!r} was not written" for name in self._places if name not in self.written]:
            raise KvfoldError(f"{self._folder}: {len(missing)} of {len(self._places)} tensors are missing", missing)
        self.sync()

    # A file is opened for each write: a model may have more files than a process may hold open.
    @contextmanager
    def _opened(self, shard: str, flags: int = os.O_RDWR) -> Iterator[int]:
        """The open file of a shard. KvfoldError names the file if the system fails, also within the block."""
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
    """A source tensor and the positions ``start`` .. ``end`` that its bytes go to: a ``place``, or a part of it."""

    place: TensorPlace
    info: TensorInfo
    start: int
    end: int
    raw: Path | None  # the file whose bytes are copied; none if the tensor is cast, or made in memory


def _moves(place: TensorPlace, checkpoint: Checkpoint) -> list[_Move]:
    """One move for each source of a tensor: a single source fills all of it, several fill one part each in order."""
    tensor = place.tensor
    moves, start = [], place.start
    for name in tensor.sources:
        info = tensor.kept or checkpoint.info(name)
        cast = info.dtype != tensor.dtype
        whole = info.shape == tensor.shape or len(tensor.sources) > 1
        if not whole or (cast and not {info.dtype, tensor.dtype} <= FLOAT_DTYPES):
            actual = f"{info.dtype} {info.shape} in {info.file}"
            raise KvfoldError(f"tensor {tensor.name!r} of {tensor.dtype} {tensor.shape} cannot be copied from {actual}")
        end = start + tensor_bytes(tensor.dtype, info.shape)
        moves.append(_Move(place, info, start, end, None if cast else checkpoint.raw_path(info)))
        start = end
    if start != place.end and moves:
        needed, found = place.end - place.start, start - place.start
        raise KvfoldError(f"tensor {tensor.name!r} needs parts of {needed} bytes in all, its sources have {found}")
    return moves


def _runs(moves: Iterable[_Move]) -> Iterator[list[_Move]]:
    """``moves`` in the order of the source's bytes; raw ones that are adjacent in source and target are one run."""
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


def _copy_run(run: Sequence[_Move], checkpoint: Checkpoint, target: int, progress: OnBytes) -> None:
    """Copy a run to the open shard ``target``: as bytes in one piece, or cast in chunks of bounded memory."""
    first, end = run[0], run[-1].info.end
    if first.raw is not None:
        with open_source(first.raw) as source:
            copy_range(source, first.info.start, end, target, first.start, progress)
        return
    from kvfold.convert.checkpoint.tensors import cast_chunk, tensor_memory, torch_dtype

    (move,) = run
    dtype, position = torch_dtype(move.place.tensor.dtype), move.start
    for chunk in checkpoint.chunks(move.info.name, _CAST_ELEMENTS):
        data = tensor_memory(cast_chunk(chunk, dtype, move.info.name) if chunk.dtype != dtype else chunk)
        write_all(target, data, position)
        position += len(data)
        progress(chunk.numel() * chunk.element_size())
