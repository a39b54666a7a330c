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

from kvfold.convert.checkpoint.file_bytes import copy_range, open_source, sync_path, write_all, write_file
from kvfold.convert.checkpoint.folder import INDEX
from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TensorInfo, tensor_bytes
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.shards import Shard, TensorPlace, shard_header, tensor_places
from kvfold.convert.errors import InputError, KvfoldError

if TYPE_CHECKING:
    import torch

OnBytes = Callable[[int], None]  # called with the number of source bytes of every step
_CAST_ELEMENTS = 8 << 20


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write model.safetensors.index.json for all ``shards`` of a checkpoint; a single one needs none."""
    if len(shards) < 2:
        return
    tensors = [(tensor, shard.file) for shard in shards for tensor in shard.tensors]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor, _ in tensors)},
        "weight_map": {tensor.name: file for tensor, file in sorted(tensors, key=lambda pair: pair[0].name)},
    }
    write_file(folder / INDEX, json.dumps(index, indent=2) + "\n")
    sync_path(folder / INDEX)


def is_laid_out(path: Path, shard: Shard) -> bool:
    """True if the file at ``path`` has the size and the header of ``shard``, which a resumed run needs."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return _has_layout(file, shard)
    finally:
        os.close(file)


def _has_layout(file: int, shard: Shard) -> bool:
    header = shard_header(shard)
    size = len(header) + sum(tensor.nbytes for tensor in shard.tensors)
    return os.fstat(file).st_size == size and os.pread(file, len(header), 0) == header


class ShardWriter:
    """Writes the shards of one output folder. Nothing is to be closed: no file is open between two writes.

    The constructor lays out every file at its final size (sparse) with its header. Tensors may then come in any order.
    ``resume_written`` names the tensors that a killed run has written to the same folder with the same plan.
    ``shards`` are the ones that this process writes: with several processes each has some, and one writes the index.
    KvfoldError if the plan names a tensor twice, or the files of a resumed run do not follow this plan.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], resume_written: Iterable[str] = ()) -> None:
        self._folder, self._shards = folder, tuple(shards)
        self._places = tensor_places(self._shards)
        self.written = set(resume_written)
        unknown = sorted(self.written - set(self._places))
        if unknown:
            raise KvfoldError(f"{folder}: expected to resume tensors of this plan, found {unknown[0]!r}; start over")
        self._copying: Future[None] | None = None
        for shard in self._shards:
            if self.written:
                with self._opened(shard.file) as file:
                    if not _has_layout(file, shard):
                        raise KvfoldError(
                            f"{folder / shard.file}: expected the shard of this plan to resume, found another; "
                            "start over"
                        )
                continue
            header = shard_header(shard)
            with self._opened(shard.file, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
                os.ftruncate(file, len(header) + sum(tensor.nbytes for tensor in shard.tensors))
                write_all(file, memoryview(header), 0)
        # a sparse file holds zeros already
        self.written.update(name for name, place in self._places.items() if place.tensor.source == ())

    def write(self, name: str, tensor: "torch.Tensor") -> None:
        """Write a computed tensor. KvfoldError if the plan has no such tensor or expects another dtype or shape."""
        from kvfold.convert.checkpoint.tensors import dtype_name, tensor_memory

        if self._copying is not None and self._copying.done():
            self._copying.result()  # a disk's failure must not surface only after hours of computing
        place = self._place(name)
        expected = place.tensor
        actual = dtype_name(tensor.dtype), tuple(tensor.shape)
        if actual != (expected.dtype, expected.shape):
            raise KvfoldError(
                f"tensor {name!r}: expected {expected.dtype} {expected.shape}, found {actual[0]} {actual[1]}"
            )
        with self._opened(place.shard) as file:
            write_all(file, tensor_memory(tensor.cpu().contiguous()), place.start)
        self.written.add(name)

    def write_all(self, tensors: Mapping[str, "torch.Tensor"]) -> int:
        """Write computed tensors, cast to their planned dtypes; returns their bytes. InputError if one overflows."""
        from kvfold.convert.checkpoint.tensors import cast_chunk, torch_dtype

        for name, tensor in tensors.items():
            self.write(name, cast_chunk(tensor, torch_dtype(self._place(name).tensor.dtype), name))
        return sum(self._place(name).tensor.nbytes for name in tensors)

    def write_own(self, tensors: Mapping[str, "torch.Tensor"]) -> int:
        """``write_all`` of the ``tensors`` that lie in this process's shards."""
        return self.write_all({name: tensor for name, tensor in tensors.items() if name in self._places})

    def copy_rest(self, checkpoint: Checkpoint, progress: OnBytes = lambda count: None) -> None:
        """Copy every tensor that has a source and is not written yet, in the order of the source's bytes."""
        places = [
            place for name, place in self._places.items() if name not in self.written and not place.tensor.computed
        ]
        moves = [move for place in places for move in _moves(place, checkpoint)]
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
        missing = [name for name in self._places if name not in self.written]
        if missing:
            details = [f"tensor {name!r} was not written" for name in missing]
            raise KvfoldError(f"{self._folder}: expected {len(self._places)} tensors, {len(missing)} missing", details)
        self.sync()

    def _place(self, name: str) -> TensorPlace:
        if name not in self._places:
            raise KvfoldError(f"tensor {name!r}: expected a tensor of the plan, found none of that name")
        return self._places[name]

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
        except FileNotFoundError:
            raise KvfoldError(f"{path}: expected a shard to resume, found none; start over") from None
        except FileExistsError:
            raise
        except OSError as error:
            raise KvfoldError(f"{path}: expected to be able to write it, found: {error.strerror or error}") from error


@dataclass(frozen=True)
class _Move:
    """A source tensor and the positions ``start`` .. ``end`` that its bytes go to: all of a ``place``, or a part of it.

    ``raw`` is the file whose bytes are copied, None if there is none: the tensor is cast, or made in memory.
    """

    place: TensorPlace
    info: TensorInfo
    start: int
    end: int
    cast: bool
    raw: Path | None


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
            raise KvfoldError(f"tensor {tensor.name!r}: expected {tensor.dtype} {tensor.shape}, found {actual}")
        end = start + tensor_bytes(tensor.dtype, info.shape)
        moves.append(_Move(place, info, start, end, cast, None if cast else checkpoint.raw_path(info)))
        start = end
    if start != place.end and moves:
        expected, found = place.end - place.start, start - place.start
        raise KvfoldError(f"tensor {tensor.name!r}: expected parts of {expected} bytes in all, found {found}")
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
            try:
                length = end - first.info.start
                copy_range(source.fileno(), first.info.start, target, first.start, length, progress)
            except EOFError:
                expected = f"expected {end} bytes, found the end of the file"
                raise InputError(f"{first.raw}: {expected}: it changed while it was read; run again") from None
        return
    from kvfold.convert.checkpoint.tensors import cast_chunk, tensor_memory, torch_dtype

    (move,) = run
    dtype, position = torch_dtype(move.place.tensor.dtype), move.start
    for chunk in checkpoint.chunks(move.info.name, _CAST_ELEMENTS):
        data = tensor_memory(cast_chunk(chunk, dtype, move.info.name) if move.cast else chunk)
        write_all(target, data, position)
        position += len(data)
        progress(chunk.numel() * chunk.element_size())
