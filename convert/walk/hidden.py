"""Hidden states: the residual streams of all sequences, in chunks; in memory, or in a file for more than fits there.

A chunk is ``[b, T, E]``, the sequences of one layer call; all but the last have the same ``b``. In memory they are a
list. A ``Spill`` keeps them in a file, where a chunk is read when it is taken out and written when it is replaced::

    with Spill("/scratch") as keep:                      # in memory: keep = list
        states = keep(map(stream.embed, chunks))
        states[0] = layer(states[0])
        before = states[:]                               # shares the chunks until they are replaced in one of the two

The file has no name, so the system removes it with the process, however that ends.
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
from kvfold.convert.errors import InputError, KvfoldError, opt

Hidden = MutableSequence[Tensor]
# Stores hidden states: ``list`` in memory, a ``Spill`` in its file.
Keep = Callable[[Iterable[Tensor]], Hidden]


class Spill(ExitStack):
    """A file without a name in ``folder``, until the block ends. InputError when none can be made there."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self._folder = folder
        # Starts of chunks that nothing refers to any more, by their size.
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._end = 0
        try:
            self._file = self.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115
        except OSError as error:
            raise InputError(
                f"{opt('spill', folder)} must be a folder to write to, but {error.strerror}; choose another"
            ) from None

    def __call__(self, states: Iterable[Tensor] = ()) -> "Spilled":
        """``states`` in the file."""
        return Spilled(self, [self.store(chunk) for chunk in states])

    def store(self, chunk: Tensor) -> "_Stored":
        """``chunk`` in the file; its place is free again when nothing refers to the result. KvfoldError when full."""
        # Chunks of a model have two sizes at most: a place that is free fits the next of its size.
        free = self._free[chunk.nbytes]
        start = free.pop() if free else self._end
        self._end = max(self._end, start + chunk.nbytes)
        try:
            write_all(self._file.fileno(), tensor_memory(chunk.cpu()), start)
        except OSError as error:
            raise KvfoldError(
                f"{opt('spill', self._folder)}: hidden states could not be written: {error.strerror}; free some space, "
                "or choose a folder on another disk"
            ) from None
        stored = _Stored(start, chunk.nbytes, chunk.shape, chunk.dtype, chunk.device)
        weakref.finalize(stored, free.append, start)
        return stored

    def load(self, stored: "_Stored", row: int | None = None) -> Tensor:
        """A stored chunk, or one of its sequences."""
        shape, start, count = stored.shape, stored.start, stored.nbytes
        if row is not None:
            shape, count = shape[1:], count // shape[0]
            start += row * count
        self._file.seek(start)
        flat = torch.from_numpy(np.fromfile(self._file, np.uint8, count))
        return flat.view(stored.dtype).view(shape).to(stored.device)


@dataclass(frozen=True, eq=False)
class _Stored:
    """The place of a chunk in the file."""

    start: int
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass
class Spilled(MutableSequence[Tensor]):
    """Hidden states in the file of a `Spill`."""

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
    """Sequence ``index`` of all, ``[T, E]``; of a file no other is read."""
    if isinstance(states, Spilled):
        chunk, row = divmod(index, states.stored[0].shape[0])
        return states.spill.load(states.stored[chunk], row)
    chunk, row = divmod(index, len(states[0]))
    return states[chunk][row]


@dataclass
class Recomputed(Iterable[LayerOutput]):
    """The outputs of ``layer`` for ``states``, run when they are taken out."""

    layer: OpenLayer
    states: Hidden

    def __iter__(self) -> Iterator[LayerOutput]:
        for chunk in self.states:
            with torch.no_grad():
                output = self.layer(chunk)
            yield output
