"""Write a checkpoint's shards in any order: every tensor's place is fixed by the plan before the first byte is written.

What a transform did not touch goes from file to file as bytes, never decoded, in runs as long as the plan allows.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.io.checkpoint import Checkpoint
from kvfold.convert.io.copying import SourceEnded, copy_range, open_source, write_all
from kvfold.convert.io.folder import INDEX
from kvfold.convert.io.headers import FLOAT_DTYPES, TensorInfo, tensor_bytes
from kvfold.convert.io.shard_plan import OutputTensor, Shard, assign_shards, shard_header, shard_index

if TYPE_CHECKING:
    import torch

__all__ = ["OutputTensor", "Shard", "ShardWriter", "assign_shards", "write_index", "write_synced"]

OnBytes = Callable[[int], None]  # told how many bytes were copied
CAST_ELEMENTS = 8 << 20


def _ignore(_: int) -> None:
    pass


@dataclass(frozen=True)
class _Place:
    tensor: OutputTensor
    shard: str
    start: int
    end: int


@dataclass(frozen=True)
class _Move:
    """A source tensor and where its bytes go: to the whole of a ``place`` or to a part of it.

    ``raw`` is the file whose bytes are copied, None where they are not.
    """

    place: _Place
    info: TensorInfo
    start: int
    cast: bool
    raw: Path | None

    @property
    def end(self) -> int:
        return self.start + tensor_bytes(self.place.tensor.dtype, self.info.shape)


class ShardWriter:
    """The shards of one output folder, opened for each write: a model may have more than a process may open.

    Making it lays out every file at its final size (sparse) with its header. Tensors may then come in any order.
    ``resume_written`` names the tensors a killed run had already written to the same folder with the same plan.
    ``shards`` are those that this process writes: of several processes each has some, and one writes the index.
    KvfoldError when the plan names a tensor twice, or when the files of a resumed run do not follow this plan.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], resume_written: Iterable[str] = ()) -> None:
        self._folder, self._shards = folder, tuple(shards)
        self._places = _places(self._shards)
        self.written = set(resume_written)
        unknown = sorted(self.written - set(self._places))
        if unknown:
            raise KvfoldError(f"{folder}: expected to resume tensors of this plan, found {unknown[0]!r}; start over")
        self._copying: Future[None] | None = None
        for shard in self._shards:
            with self._opened(shard.file, os.O_RDWR if self.written else os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
                _lay_out(file, folder / shard.file, shard, resumed=bool(self.written))
        zeros = (name for name, place in self._places.items() if place.tensor.source == ())
        self.written.update(zeros)  # a sparse file holds them

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close: no file is open between two writes."""

    def write(self, name: str, tensor: "torch.Tensor") -> None:
        """Write a computed tensor. KvfoldError when the plan has no such tensor or expects another dtype or shape."""
        from kvfold.convert.io.tensors import dtype_name, tensor_memory

        if self._copying is not None and self._copying.done():
            self._copying.result()  # what is computed for hours must not wait so long for a disk's failure
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
        """Write computed tensors, cast to their planned dtypes; returns their bytes. InputError when one overflows."""
        from kvfold.convert.io.tensors import cast_chunk, torch_dtype

        for name, tensor in tensors.items():
            self.write(name, cast_chunk(tensor, torch_dtype(self._place(name).tensor.dtype), name))
        return sum(self._place(name).tensor.nbytes for name in tensors)

    def write_own(self, tensors: Mapping[str, "torch.Tensor"]) -> int:
        """``write_all`` of those of a layer's tensors that are in this process's shards."""
        return self.write_all({name: tensor for name, tensor in tensors.items() if name in self._places})

    def copy(self, name: str, checkpoint: Checkpoint, progress: OnBytes = _ignore) -> None:
        """Copy one tensor from its source: its bytes, or cast in bounded chunks when the dtype differs."""
        self._copy_all([self._place(name)], checkpoint, progress)

    def copy_rest(self, checkpoint: Checkpoint, progress: OnBytes = _ignore) -> None:
        """Copy every tensor that has a source and is not yet written, in the order of the source's bytes.

        ``progress`` is called with the number of source bytes of every step.
        """
        rest = [place for name, place in self._places.items() if name not in self.written and not place.tensor.computed]
        self._copy_all(rest, checkpoint, progress)

    @contextmanager
    def copying_rest(self, checkpoint: Checkpoint, progress: OnBytes = _ignore) -> Iterator[None]:
        """``copy_rest`` beside the block, which meanwhile reads the checkpoint and writes what it computes.

        Copying waits for the disk and computing for the processor: together they take little longer than the slower of
        them. The block's error stops the copy; the copy's is raised by the next ``write`` or when the block ends.
        ``progress`` is called from another thread. Sources with tensors that are made in memory (of legacy files, or
        dequantized) are copied afterwards.
        """
        if any(checkpoint.raw_path(info) is None for info in checkpoint.tensors.values()):
            yield
            self.copy_rest(checkpoint, progress)
            return
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
        """Make what is written so far survive a crash of the machine; call before noting progress for a resume."""
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

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise KvfoldError(f"tensor {name!r}: expected a tensor of the plan, found none of that name")
        return self._places[name]

    @contextmanager
    def _opened(self, shard: str, flags: int = os.O_RDWR) -> Iterator[int]:
        """The open file of a shard. KvfoldError names the file when the system fails."""
        path = self._folder / shard
        try:
            file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            raise KvfoldError(f"{path}: expected a shard to resume, found none; start over") from None
        except FileExistsError:
            raise
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            yield file
        except OSError as error:
            raise _unwritable(path, error) from error
        finally:
            os.close(file)

    def _copy_all(self, places: Iterable[_Place], checkpoint: Checkpoint, progress: OnBytes) -> None:
        moves = [move for place in places for move in _moves(place, checkpoint)]
        left = Counter(move.place.tensor.name for move in moves)
        for run in _runs(sorted(moves, key=_source_order)):
            self._copy_run(run, checkpoint, progress)
            left.subtract(move.place.tensor.name for move in run)
            self.written.update(name for move in run if left[name := move.place.tensor.name] == 0)

    def _copy_run(self, run: list[_Move], checkpoint: Checkpoint, progress: OnBytes) -> None:
        first, last = run[0], run[-1]
        with self._opened(first.place.shard) as target:
            if first.raw is None:
                for move in run:
                    _copy_chunks(move, checkpoint, target, progress)
            else:
                _copy_bytes(first.raw, first, last.info.end, target, progress)


def _moves(place: _Place, checkpoint: Checkpoint) -> list[_Move]:
    """Where each source of a tensor goes: one to all of it, several to one part each, in their order."""
    tensor = place.tensor
    if tensor.computed:
        raise KvfoldError(f"tensor {tensor.name!r}: expected a source to copy from, found a computed tensor")
    moves, start = [], place.start
    for name in tensor.sources:
        info = checkpoint.info(name)
        cast = info.dtype != tensor.dtype
        whole = info.shape == tensor.shape or len(tensor.sources) > 1
        if not whole or (cast and not {info.dtype, tensor.dtype} <= FLOAT_DTYPES):
            actual = f"{info.dtype} {info.shape} in {info.file}"
            raise KvfoldError(f"tensor {tensor.name!r}: expected {tensor.dtype} {tensor.shape}, found {actual}")
        moves.append(_Move(place, info, start, cast, None if cast else checkpoint.raw_path(info)))
        start = moves[-1].end
    if start != place.end and moves:
        expected, found = place.end - place.start, start - place.start
        raise KvfoldError(f"tensor {tensor.name!r}: expected parts of {expected} bytes in all, found {found}")
    return moves


def _unwritable(path: Path, error: OSError) -> KvfoldError:
    return KvfoldError(f"{path}: expected to be able to write it, found: {error.strerror or error}")


def _source_order(move: _Move) -> tuple[str, int]:
    return move.info.file, move.info.start


def _runs(moves: list[_Move]) -> Iterator[list[_Move]]:
    """Group neighbors that are adjacent in the source and in the target: one large copy each."""
    run: list[_Move] = []
    for move in moves:
        if run and not _follows(run[-1], move):
            yield run
            run = []
        run.append(move)
    if run:
        yield run


def _follows(before: _Move, after: _Move) -> bool:
    same_files = (before.info.file, before.place.shard) == (after.info.file, after.place.shard)
    touching = before.info.end == after.info.start and before.end == after.start
    return same_files and touching and before.raw is not None and after.raw is not None


def _copy_bytes(path: Path, first: _Move, end: int, target: int, progress: OnBytes) -> None:
    with open_source(path) as source:
        try:
            copy_range(source.fileno(), first.info.start, target, first.start, end - first.info.start, progress)
        except SourceEnded:
            expected = f"expected {end} bytes, found the end of the file"
            raise InputError(f"{path}: {expected}: it changed while it was read; run again") from None


def _copy_chunks(move: _Move, checkpoint: Checkpoint, target: int, progress: OnBytes) -> None:
    from kvfold.convert.io.tensors import cast_chunk, tensor_memory, torch_dtype

    dtype, position = torch_dtype(move.place.tensor.dtype), move.start
    for chunk in checkpoint.chunks(move.info.name, CAST_ELEMENTS):
        data = tensor_memory(cast_chunk(chunk, dtype, move.info.name) if move.cast else chunk)
        write_all(target, data, position)
        position += len(data)
        progress(chunk.numel() * chunk.element_size())


def _places(shards: Sequence[Shard]) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    for shard in shards:
        position = len(shard_header(shard))
        for tensor in shard.tensors:
            if tensor.name in places:
                raise KvfoldError(f"tensor {tensor.name!r}: expected once in the plan, found twice")
            places[tensor.name] = _Place(tensor, shard.file, position, position + tensor.nbytes)
            position += tensor.nbytes
    return places


def _lay_out(file: int, path: Path, shard: Shard, resumed: bool) -> None:
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
    """Write a small file and sync it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
