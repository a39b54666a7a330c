"""Readers of tensors from safetensors files, and for weights that stay on the hub. No torch until one is read."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvfold.convert.checkpoint.headers import TensorInfo
from kvfold.convert.errors import KvfoldError

if TYPE_CHECKING:
    import torch


class Reader(Protocol):
    """Reads tensors. ``raw_path`` is None if no file holds the tensor's bytes at ``start`` .. ``end``."""

    def read(self, info: TensorInfo) -> "torch.Tensor": ...

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]": ...

    def raw_path(self, info: TensorInfo) -> Path | None: ...

    def close(self) -> None: ...


class SafetensorsReader:
    """Reads local safetensors files by position; ``paths`` maps file names to real paths."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths = paths

    def read(self, info: TensorInfo) -> "torch.Tensor":
        from kvfold.convert.checkpoint.tensors import read_tensor

        return read_tensor(self._paths[info.file], info)

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]":
        from kvfold.convert.checkpoint.tensors import read_chunks

        return read_chunks(self._paths[info.file], info, elements)

    def raw_path(self, info: TensorInfo) -> Path | None:
        return self._paths[info.file]

    def close(self) -> None:
        pass


class NoReader:
    """For weights of which only headers were fetched from the hub: reading one is an error."""

    def read(self, info: TensorInfo) -> "torch.Tensor":
        raise KvfoldError(f"tensor {info.name!r}: expected local weights to read it from, found headers only")

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]":
        return iter([self.read(info)])

    def raw_path(self, info: TensorInfo) -> Path | None:
        return None

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Weights:
    """Tensors as the rest of the package sees them, in the order of their bytes, with config.json and their reader.

    ``made_of`` says what they were made from, a line for each step; empty for weights that are stored as they are.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    reader: Reader
    made_of: tuple[str, ...] = ()
