"""Plan a checkpoint's files: the shard and offset of every tensor, fixed before the first byte is
written.
"""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvfold.convert.checkpoint.folder import SINGLE
from kvfold.convert.checkpoint.headers import DTYPE_BITS, LENGTH_BYTES, tensor_bytes
from kvfold.convert.errors import KvfoldError

_ALIGNMENT = 8
_METADATA: dict[str, object] = {"format": "pt"}
_TIGHT = (",", ":")


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written.

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
        """The names of the source tensors to copy, in the order in which they are concatenated."""
        return (self.source,) if isinstance(self.source, str) else self.source or ()

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)

    def entry(self, start: int) -> dict[str, dict[str, object]]:
        """The tensor's entry in a safetensors header, with its bytes beginning at ``start``."""
        offsets = [start, start + self.nbytes]
        return {self.name: {"dtype": self.dtype, "shape": self.shape, "data_offsets": offsets}}


@dataclass(frozen=True)
class Shard:
    """One output file and its tensors, in byte order."""

    file: str
    tensors: tuple[OutputTensor, ...]

    @cached_property
    def header(self) -> bytes:
        """The bytes before the first tensor: length and JSON, padded with spaces to a multiple of 8
        bytes.
        """
        entries: dict[str, dict[str, object]] = {"__metadata__": _METADATA}
        position = 0
        for tensor in self.tensors:
            entries |= tensor.entry(position)
            position += tensor.nbytes
        header = json.dumps(entries, separators=_TIGHT).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        return struct.pack("<Q", len(header)) + header

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor: bytes ``start`` .. ``end`` of the file ``shard``."""

    tensor: OutputTensor
    shard: str
    start: int
    end: int


def assign_shards(tensors: Iterable[OutputTensor], max_bytes: int) -> list[Shard]:
    """Fill shards in the given order, each up to ``max_bytes``; a tensor that is larger gets a file
    of its own.
    """
    groups: list[list[OutputTensor]] = []
    used = 0
    for tensor in tensors:
        # an upper bound: how many digits its offsets have is not known before the shard is full
        cost = tensor.nbytes + len(json.dumps(tensor.entry(10**12), separators=_TIGHT))
        if not groups or used + cost > max_bytes:
            groups.append([])
            used = LENGTH_BYTES + len(json.dumps(_METADATA)) + 16
        groups[-1].append(tensor)
        used += cost
    count = len(groups)
    names = (
        [SINGLE]
        if count == 1
        else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    )
    # wider dtypes first: every tensor then begins at a multiple of its item size, as memory maps
    # need; computed tensors last: what is copied can be hashed while they are computed
    return [
        Shard(
            name,
            tuple(
                sorted(group, key=lambda tensor: (-DTYPE_BITS[tensor.dtype], tensor.source is None))
            ),
        )
        for name, group in zip(names, groups, strict=True)
    ]


def tensor_places(shards: Sequence[Shard]) -> dict[str, TensorPlace]:
    """Map each tensor's name to its place. Raises KvfoldError if the plan contains a name twice."""
    places: dict[str, TensorPlace] = {}
    for shard in shards:
        position = len(shard.header)
        for tensor in shard.tensors:
            if tensor.name in places:
                raise KvfoldError(f"tensor {tensor.name!r} appears in the plan twice")
            places[tensor.name] = TensorPlace(
                tensor, shard.file, position, position + tensor.nbytes
            )
            position += tensor.nbytes
    return places
