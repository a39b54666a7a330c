"""Tensors by their headers, and the base class of what reads their bytes. Imports no torch until a tensor is read."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.headers import TensorInfo
from kvfold.convert.errors import KvfoldError

if TYPE_CHECKING:
    import torch


class Reader:
    """Reads tensors; subclasses for safetensors files, legacy files and quantized weights.

    This base class serves headers that were fetched from the hub without their weights: reading one is an error.
    """

    def read(self, info: TensorInfo) -> "torch.Tensor":
        """The tensor on the CPU, owning its memory."""
        raise KvfoldError(f"tensor {info.name!r}: expected local weights to read it from, found headers only")

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]":
        """The elements in order, flat, at most ``elements`` at a time."""
        import torch

        return iter(torch.split(self.read(info).reshape(-1), elements))

    def raw_path(self, info: TensorInfo) -> Path | None:
        """The file that holds the tensor's bytes at ``start`` .. ``end``; None if there is none."""
        return None

    def close(self) -> None:
        """Give memory and files back; a later read opens them again."""


@dataclass(frozen=True)
class Weights:
    """Tensors as the rest of the package sees them, in the order of their bytes, with config.json and their reader.

    ``made_of`` says what they were made from, a line for each step; empty for weights that are stored as they are.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    reader: Reader
    made_of: tuple[str, ...] = ()
