"""Hidden states: the residual streams of all sequences, in chunks, stored in memory or in a file on
disk.

A chunk is ``[b, T, E]``, the sequences of one layer call; all chunks but the last have the same
``b``. In memory, the chunks are a list. A ``Spill`` stores them in a file: indexing reads a chunk,
and assignment writes the new one::

    with Spill("/scratch") as keep:                      # in memory: keep = list states =
    keep(map(stream.embed, chunks)) states[0] = layer(states[0]) before = states[:]
    # shares chunks until either list replaces them

The file has no name, so the system removes it when the process ends, even after a crash.
"""

import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvfold.attention.drift.recording import LayerOutput, OpenLayer
from kvfold.convert.checkpoint.files import write_all
from kvfold.convert.checkpoint.tensors import tensor_memory
from kvfold.convert.errors import KvfoldError, option_error

Hidden = MutableSequence[Tensor]
# Stores hidden states: ``list`` in memory, ``Spill`` in a file.
Keep = Callable[[Iterable[Tensor]], Hidden]


class Spill(ExitStack):
    """A nameless file in ``folder`` that exists until the block ends. Raises InputError if it
    cannot be created.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self._folder = folder
        # Start offsets of chunks that are no longer referenced, by size.
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._end = 0
        try:
            self._file = self.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
        except OSError as error:
            raise option_error(
                "spill",
                folder,
                f"must be a writable folder ({error.strerror}); choose another folder",
            ) from None

    def __call__(self, states: Iterable[Tensor] = ()) -> "Spilled":
        """Write ``states`` to the file and return a list-like view of them."""
        return Spilled(self, [self.store(chunk) for chunk in states])

    def store(self, chunk: Tensor) -> "_Stored":
        """Write ``chunk`` to the file; its space is reused once the result is no longer referenced.

        Raises KvfoldError if the chunk cannot be written.
        """
        # A model's chunks have at most two sizes, so a free place exactly fits the next chunk of
        # its size.
        free = self._free[chunk.nbytes]
        start = free.pop() if free else self._end
        self._end = max(self._end, start + chunk.nbytes)
        try:
            write_all(self._file.fileno(), tensor_memory(chunk.cpu()), start)
        except OSError as error:
            raise KvfoldError(
                f"--spill {self._folder}: hidden states could not be written"
                f" ({error.strerror}); free some disk space, or choose a folder on another disk"
            ) from None
        stored = _Stored(start, chunk.nbytes, chunk.shape, chunk.dtype, chunk.device)
        weakref.finalize(stored, free.append, start)
        return stored

    def load(self, stored: "_Stored", row: int | None = None) -> Tensor:
        """Read a stored chunk, or only its sequence ``row``."""
        shape = stored.shape
        start = stored.start
        count = stored.nbytes
        if row is not None:
            shape, count = shape[1:], count // shape[0]
            start += row * count
        self._file.seek(start)
        flat = torch.from_numpy(np.fromfile(self._file, np.uint8, count))
        return flat.view(stored.dtype).view(shape).to(stored.device)


@dataclass(frozen=True, eq=False)
class _Stored:
    """The location of a chunk in the file, with its shape, dtype and device."""

    start: int
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass
class Spilled(MutableSequence[Tensor]):
    """Hidden states stored in the file of a `Spill`."""

    spill: Spill
    stored: list[_Stored]

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, index: Any) -> Any:
        chosen = self.stored[index]
        return Spilled(self.spill, chosen) if isinstance(chosen, list) else self.spill.load(chosen)

    def __setitem__(self, index: Any, chunk: Any) -> None:
        self.stored[index] = self.spill.store(chunk)

    def __delitem__(self, index: int | slice) -> None:
        del self.stored[index]

    def insert(self, index: int, chunk: Tensor) -> None:
        self.stored.insert(index, self.spill.store(chunk))


def sequence(states: Hidden, index: int) -> Tensor:
    """Return sequence ``index`` of all sequences, ``[T, E]``; only this sequence is read if they
    are in a file.
    """
    if isinstance(states, Spilled):
        chunk, row = divmod(index, states.stored[0].shape[0])
        return states.spill.load(states.stored[chunk], row)
    chunk, row = divmod(index, len(states[0]))
    return states[chunk][row]


@dataclass
class Recomputed(Iterable[LayerOutput]):
    """The outputs of ``layer`` for ``states``, recomputed on every iteration."""

    layer: OpenLayer
    states: Hidden

    def __iter__(self) -> Iterator[LayerOutput]:
        return map(torch.no_grad()(self.layer), self.states)
