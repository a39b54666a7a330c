"""Hidden states: the residual streams of all sequences, in chunks; in memory, or in a file for more than fits there.

A chunk is ``[b, T, E]``, the sequences of one layer call; all but the last have the same ``b``. In memory they are a
list. A ``Spill`` keeps them in a file, where a chunk is read when it is asked for and written when it is replaced::

    with Spill("/scratch") as keep:                      # in memory: keep = list
        states = keep(map(stream.embed, chunks))
        states[0] = layer(states[0])
        before = states[:]                               # shares the chunks until they are replaced in one of the two

The file has no name, so the system removes it with the process, however that ends.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import torch
from torch import Tensor

from kvfold.attention.drift.recording import LayerOutput, OpenLayer
from kvfold.convert.checkpoint.files import write_all
from kvfold.convert.checkpoint.tensors import tensor_memory
from kvfold.convert.errors import InputError, KvfoldError, opt

Hidden = MutableSequence[Tensor]
# Stores hidden states: ``list`` in memory, a ``Spill`` in its file.
Keep = Callable[[Iterable[Tensor]], Hidden]

# Bytes; a call of the system reads 2 GiB at most.
_READ_AT_ONCE = 1 << 30


class Spill:
    """A file without a name in ``folder``. InputError when none can be made there."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder
        # Starts of chunks that nothing refers to any more, by their size.
        self._free: dict[int, list[int]] = {}
        self._end = 0
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise InputError(
                f"{opt('spill', folder)}: expected a folder to write to, found: {error.strerror}; choose another"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __call__(self, states: Iterable[Tensor] = ()) -> "Spilled":
        """``states`` in the file."""
        return Spilled(self, [self.store(chunk) for chunk in states])

    def store(self, chunk: Tensor) -> "_Stored":
        """KvfoldError where the disk takes no more."""
        free = self._free.get(chunk.nbytes)
        start = free.pop() if free else self._end
        self._end = max(self._end, start + chunk.nbytes)
        try:
            write_all(self._file.fileno(), tensor_memory(chunk.cpu()), start)
        except OSError as error:
            raise KvfoldError(
                f"{opt('spill', self._folder)}: expected to be able to write hidden states, found: "
                f"{error.strerror}; free "
                "some space, or choose a folder on another disk"
            ) from None
        return _Stored(start, chunk.nbytes, chunk.shape, chunk.dtype, chunk.device, self._free)

    def load(self, stored: "_Stored", row: int | None = None) -> Tensor:
        """A stored chunk, or one of its sequences."""
        shape, start = stored.shape, stored.start
        if row is not None:
            shape, start = shape[1:], start + row * (stored.nbytes // shape[0])
        tensor = torch.empty(shape, dtype=stored.dtype)
        view, done = tensor_memory(tensor), 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done : done + _READ_AT_ONCE]], start + done)
            if count == 0:
                raise KvfoldError(f"{opt('spill', self._folder)}: expected {len(view)} bytes at {start}, found the end")
            done += count
        return tensor.to(stored.device)


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """The place of a chunk in the file, which is ``free`` again when nothing refers to it any more."""

    start: int
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    free: dict[int, list[int]]

    def __del__(self) -> None:
        self.free.setdefault(self.nbytes, []).append(self.start)


class Spilled(MutableSequence[Tensor]):
    """Hidden states in the file of a `Spill`."""

    def __init__(self, spill: Spill, stored: list[_Stored]) -> None:
        self._spill, self._stored = spill, stored

    def __len__(self) -> int:
        return len(self._stored)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> "Spilled": ...
    def __getitem__(self, index: int | slice) -> "Tensor | Spilled":
        if isinstance(index, slice):
            return Spilled(self._spill, self._stored[index])
        return self._spill.load(self._stored[index])

    def __setitem__(self, index: Any, chunk: Any) -> None:
        self._stored[index] = self._spill.store(chunk)

    def __delitem__(self, index: int | slice) -> None:
        del self._stored[index]

    def insert(self, index: int, chunk: Tensor) -> None:
        self._stored.insert(index, self._spill.store(chunk))

    def sequence(self, index: int) -> Tensor:
        """Sequence ``index`` of all, ``[T, E]``; no other is read."""
        chunk, row = divmod(index, self._stored[0].shape[0])
        return self._spill.load(self._stored[chunk], row)


def sequence(states: Hidden, index: int) -> Tensor:
    """Sequence ``index`` of all, ``[T, E]``."""
    if isinstance(states, Spilled):
        return states.sequence(index)
    chunk, row = divmod(index, len(states[0]))
    return states[chunk][row]


class Recomputed(Sequence[LayerOutput]):
    """The outputs of ``layer`` for ``states``, run when they are asked for.

    They take several times the room of the states: where these are in a file, the outputs are too many for the memory.
    """

    def __init__(self, layer: OpenLayer, states: Hidden) -> None:
        self._layer, self._states = layer, states

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Recomputed(self._layer, self._states[index])
        with torch.no_grad():
            return self._layer(self._states[index])
