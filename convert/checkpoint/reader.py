"""An opened checkpoint, and what reads the bytes of its tensors. Imports no torch until a tensor is read."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.folder import extra_names, file_states
from kvfold.convert.checkpoint.headers import TensorInfo
from kvfold.convert.errors import InputError, KvfoldError

if TYPE_CHECKING:
    import torch


class Reader:
    """Reads tensors; subclasses for safetensors files, legacy files and quantized weights.

    ``raw`` has the files in which tensors that are not ``made`` lie at ``start`` .. ``end``. This base class serves
    headers that were fetched from the hub without their weights: reading one is an error.
    """

    raw: Mapping[str, Path] = MappingProxyType({})

    def read(self, info: TensorInfo) -> "torch.Tensor":
        """The tensor on the CPU, owning its memory."""
        raise KvfoldError(f"tensor {info.name!r} cannot be read: only headers were fetched; open the checkpoint whole")

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]":
        """The elements in order, flat, at most ``elements`` at a time."""
        import torch

        return iter(torch.split(self.read(info).reshape(-1), elements))

    def close(self) -> None:
        """Give memory and files back; a later read opens them again."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    ``tensors`` are in the order of their bytes, file by file. ``origin`` names the source without a machine path:
    ``id@commit`` for a hub model, else the folder's name. ``digests``: the sha256 of config.json and of each file's
    header. ``aliases`` maps a tensor that shares its storage with an earlier one of the same shape to that one (legacy
    files only; both are in ``tensors``). ``states``: every local file before it was read. ``made_of``: the stored
    formats that dense weights were dequantized from, a line for each.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    origin: str
    digests: dict[str, str]
    reader: Reader = field(default_factory=Reader)
    aliases: dict[str, str] = field(default_factory=dict)
    states: dict[Path, tuple[int, int, int, int]] = field(default_factory=dict)
    made_of: tuple[str, ...] = ()

    @property
    def hub_id(self) -> str | None:
        """The model's id on the hub, None for a folder."""
        return self.origin.partition("@")[0] if "/" in self.origin else None

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise KvfoldError(f"{self.origin} has no tensor {name!r}")
        return self.tensors[name]

    def read(self, name: str) -> "torch.Tensor":
        """The tensor on the CPU in its stored dtype, owning its memory. KvfoldError if opened from remote headers."""
        return self.reader.read(self.info(name))

    def chunks(self, name: str, elements: int) -> "Iterator[torch.Tensor]":
        """The tensor's elements in order as flat CPU tensors of at most ``elements`` each: bounded memory."""
        return self.reader.chunks(self.info(name), elements)

    def raw_path(self, info: TensorInfo) -> Path | None:
        """The file with the tensor's bytes at ``start`` .. ``end``; None for legacy, remote and made tensors."""
        return None if info.made else self.reader.raw.get(info.file)

    def source_hash(self) -> str:
        """sha256 over config.json and every file's header: names the checkpoint without reading its weights."""
        lines = [f"{file}\0{value}\n" for file, value in sorted(self.digests.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def extra_files(self) -> list[Path]:
        """Tokenizer, generation, chat template and license files, as paths in ``folder``; no Python, no weights.

        Copy their contents (``shutil.copyfile``): in a hub cache the paths are links.
        """
        return [self.folder / name for name in extra_names(os.listdir(self.folder))]

    def check_unchanged(self) -> None:
        """Raises InputError if a file changed since the checkpoint was opened; call before publishing."""
        changes, after = [], file_states(self.states)
        for path, state in self.states.items():
            if path not in after:
                changes.append(f"{path.name}: removed")
            elif after[path][:2] != state[:2]:  # device and inode
                changes.append(f"{path.name}: replaced by another file")
            elif after[path] != state:
                changes.append(f"{path.name}: written to")
        if changes:
            raise InputError(
                f"{self.origin}: {len(changes)} of its files changed during the run; nothing was kept: run again once "
                "nothing writes to them",
                changes,
            )

    def close(self) -> None:
        self.reader.close()
