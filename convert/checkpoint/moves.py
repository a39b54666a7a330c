"""What is copied from a source into a shard: which bytes go where, in runs as long as the plan allows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfold.convert.checkpoint.copying import SourceEnded, copy_range, open_source, write_all
from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TensorInfo, tensor_bytes
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.shards import Place
from kvfold.convert.errors import InputError, KvfoldError

OnBytes = Callable[[int], None]  # told how many bytes were copied
_CAST_ELEMENTS = 8 << 20


@dataclass(frozen=True)
class Move:
    """A source tensor and where its bytes go: to the whole of a ``place`` or to a part of it.

    ``raw`` is the file whose bytes are copied, None where they are not.
    """

    place: Place
    info: TensorInfo
    start: int
    cast: bool
    raw: Path | None

    @property
    def end(self) -> int:
        return self.start + tensor_bytes(self.place.tensor.dtype, self.info.shape)


def moves_of(place: Place, checkpoint: Checkpoint) -> list[Move]:
    """Where each source of a tensor goes: one to all of it, several to one part each, in their order."""
    tensor = place.tensor
    if tensor.computed:
        raise KvfoldError(f"tensor {tensor.name!r}: expected a source to copy from, found a computed tensor")
    moves, start = [], place.start
    for name in tensor.sources:
        info = tensor.kept or checkpoint.info(name)
        cast = info.dtype != tensor.dtype
        whole = info.shape == tensor.shape or len(tensor.sources) > 1
        if not whole or (cast and not {info.dtype, tensor.dtype} <= FLOAT_DTYPES):
            actual = f"{info.dtype} {info.shape} in {info.file}"
            raise KvfoldError(f"tensor {tensor.name!r}: expected {tensor.dtype} {tensor.shape}, found {actual}")
        moves.append(Move(place, info, start, cast, None if cast else checkpoint.raw_path(info)))
        start = moves[-1].end
    if start != place.end and moves:
        expected, found = place.end - place.start, start - place.start
        raise KvfoldError(f"tensor {tensor.name!r}: expected parts of {expected} bytes in all, found {found}")
    return moves


def runs(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """``moves`` in the order of the source's bytes; neighbors that are adjacent in source and target are one run."""
    run: list[Move] = []
    for move in sorted(moves, key=lambda move: (move.info.file, move.info.start)):
        if run and not _follows(run[-1], move):
            yield run
            run = []
        run.append(move)
    if run:
        yield run


def copy_run(run: Sequence[Move], checkpoint: Checkpoint, target: int, progress: OnBytes) -> None:
    """Copy a run of `runs` to the open shard ``target``: in one piece, or cast in bounded chunks."""
    first, last = run[0], run[-1]
    if first.raw is not None:
        _copy_bytes(first.raw, first, last.info.end, target, progress)
        return
    for move in run:
        _copy_chunks(move, checkpoint, target, progress)


def _follows(before: Move, after: Move) -> bool:
    same_files = (before.info.file, before.place.shard) == (after.info.file, after.place.shard)
    touching = before.info.end == after.info.start and before.end == after.start
    return same_files and touching and before.raw is not None and after.raw is not None


def _copy_bytes(path: Path, first: Move, end: int, target: int, progress: OnBytes) -> None:
    with open_source(path) as source:
        try:
            copy_range(source.fileno(), first.info.start, target, first.start, end - first.info.start, progress)
        except SourceEnded:
            expected = f"expected {end} bytes, found the end of the file"
            raise InputError(f"{path}: {expected}: it changed while it was read; run again") from None


def _copy_chunks(move: Move, checkpoint: Checkpoint, target: int, progress: OnBytes) -> None:
    from kvfold.convert.checkpoint.tensors import cast_chunk, tensor_memory, torch_dtype

    dtype, position = torch_dtype(move.place.tensor.dtype), move.start
    for chunk in checkpoint.chunks(move.info.name, _CAST_ELEMENTS):
        data = tensor_memory(cast_chunk(chunk, dtype, move.info.name) if move.cast else chunk)
        write_all(target, data, position)
        position += len(data)
        progress(chunk.numel() * chunk.element_size())
