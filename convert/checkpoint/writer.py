"""Write a checkpoint's shards in any order: every tensor's place is fixed by the plan before the first byte is written.

What a transform did not touch goes from file to file as bytes, never decoded, in runs as long as the plan allows.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.convert.checkpoint.copying import write_all
from kvfold.convert.checkpoint.moves import OnBytes, copy_run, moves_of, runs
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.shard_files import lay_out
from kvfold.convert.checkpoint.shards import Place, Shard, tensor_places
from kvfold.convert.errors import KvfoldError

if TYPE_CHECKING:
    import torch


def _ignore(_: int) -> None:
    pass


class ShardWriter:
    """The shards of one output folder, opened for each write: a model may have more than a process may open.

    Making it lays out every file at its final size (sparse) with its header. Tensors may then come in any order.
    ``resume_written`` names the tensors a killed run had already written to the same folder with the same plan.
    ``shards`` are those that this process writes: of several processes each has some, and one writes the index.
    KvfoldError when the plan names a tensor twice, or when the files of a resumed run do not follow this plan.
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
            with self._opened(shard.file, os.O_RDWR if self.written else os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
                lay_out(file, folder / shard.file, shard, resumed=bool(self.written))
        zeros = (name for name, place in self._places.items() if place.tensor.source == ())
        self.written.update(zeros)  # a sparse file holds them

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close: no file is open between two writes."""

    def write(self, name: str, tensor: "torch.Tensor") -> None:
        """Write a computed tensor. KvfoldError when the plan has no such tensor or expects another dtype or shape."""
        from kvfold.convert.checkpoint.tensors import dtype_name, tensor_memory

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
        from kvfold.convert.checkpoint.tensors import cast_chunk, torch_dtype

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

    def _place(self, name: str) -> Place:
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

    def _copy_all(self, places: Iterable[Place], checkpoint: Checkpoint, progress: OnBytes) -> None:
        moves = [move for place in places for move in moves_of(place, checkpoint)]
        left = Counter(move.place.tensor.name for move in moves)
        for run in runs(moves):
            with self._opened(run[0].place.shard) as target:
                copy_run(run, checkpoint, target, progress)
            left.subtract(move.place.tensor.name for move in run)
            self.written.update(name for move in run if left[name := move.place.tensor.name] == 0)


def _unwritable(path: Path, error: OSError) -> KvfoldError:
    return KvfoldError(f"{path}: expected to be able to write it, found: {error.strerror or error}")
