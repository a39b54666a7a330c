"""An opened checkpoint and the base class of its readers. Imports torch only when a tensor is read."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.folder import (
    CHAT_FILES,
    CONFIG,
    file_states,
    json_beside,
    with_templates,
)
from kvfold.convert.checkpoint.hashing import hashing_source
from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TensorInfo
from kvfold.convert.errors import InputError, KvfoldError

if TYPE_CHECKING:
    import torch


class Reader:
    """Reads tensors. Subclasses read safetensors files and legacy files.

    ``raw`` maps file names to paths; tensors have their bytes at ``start`` .. ``end`` of these
    files. This base class serves headers that were fetched from the hub: reading a tensor raises an
    error.
    """

    raw: Mapping[str, Path] = MappingProxyType({})

    def read(self, info: TensorInfo) -> "torch.Tensor":
        """Read a tensor into CPU memory of its own."""
        raise KvfoldError(
            f"tensor {info.name!r} cannot be read: only headers were fetched; use open_checkpoint"
        )

    def chunks(self, info: TensorInfo, elements: int) -> "Iterator[torch.Tensor]":
        """Yield the elements in order, as flat tensors of at most ``elements`` each."""
        import torch

        return iter(torch.split(self.read(info).reshape(-1), elements))

    def close(self) -> None:
        """Release memory and files; a later read opens them again."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    ``tensors`` are in byte order, file by file. ``origin`` names the source without a local path:
    ``id@commit`` for a hub model, else the folder's name. ``config_hash`` is the SHA-256 of
    config.json, and ``hashes`` has those of the weight files, by path in ``paths``, once they are
    computed. ``states`` describes every local file before it was read.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    origin: str
    config_hash: str
    reader: Reader = field(default_factory=Reader)
    states: dict[Path, tuple[int, int, int, int]] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    hashes: dict[Path, str] = field(default_factory=dict)

    @property
    def hub_id(self) -> str | None:
        """The model's id on the hub, or None for a folder."""
        return self.origin.partition("@")[0] if "/" in self.origin else None

    @property
    def chats(self) -> bool:
        """True if the tokenizer has a chat template, which is in one of two files."""
        settings, template = CHAT_FILES
        return (
            bool(json_beside(self.folder, settings).get("chat_template"))
            or (self.folder / template).is_file()
        )

    def float_bytes(self) -> Counter[str]:
        """The bytes of floating-point tensors by dtype."""
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            if info.dtype in FLOAT_DTYPES:
                sizes[info.dtype] += info.nbytes
        return sizes

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise KvfoldError(f"{self.origin} has no tensor {name!r}")
        return self.tensors[name]

    def read(self, name: str) -> "torch.Tensor":
        """Read a tensor in its stored dtype into CPU memory of its own. KvfoldError if only headers
        were fetched.
        """
        return self.reader.read(self.info(name))

    def chunks(self, name: str, elements: int) -> "Iterator[torch.Tensor]":
        """Yield a tensor's elements in order, as flat CPU tensors of at most ``elements`` each, to
        limit memory use.
        """
        return self.reader.chunks(self.info(name), elements)

    def raw_path(self, info: TensorInfo) -> Path | None:
        """The file with the tensor's bytes at ``start`` .. ``end``; None for legacy and remote
        tensors.
        """
        return self.reader.raw.get(info.file)

    @contextmanager
    def hashing(
        self, share: range | None = None, copied_first: bool = False
    ) -> Iterator[Callable[[Path, int, int], None]]:
        """Hash the weight files, or a ``share`` of them, while the block reads them: see
        ``hashing_source``.
        """
        paths = [self.paths[name] for name in sorted(self.paths)]
        chosen = paths if share is None else [paths[number] for number in share]
        with hashing_source(
            [path for path in chosen if path not in self.hashes], self.hashes, copied_first
        ) as copied:
            yield copied

    def source_hash(self) -> str:
        """The SHA-256 of what ``sha256sum`` prints for config.json and every weight file, in the
        order of their names.

        Reads the files unless ``hashing`` has. Raises KvfoldError if only headers were fetched.
        """
        if self.tensors and not self.paths:
            raise KvfoldError(
                f"{self.origin} cannot be hashed: only headers were fetched; use open_checkpoint"
            )
        with self.hashing():
            pass
        hashes = {CONFIG: self.config_hash} | {
            name: self.hashes[path] for name, path in self.paths.items()
        }
        lines = [
            f"{value}  {name}\n" for name, value in sorted(hashes.items(), key=lambda item: item[0])
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def extra_files(self) -> list[Path]:
        """Paths of the tokenizer, generation, chat template and license files in ``folder``; no
        Python, no weights.
        """
        return [self.folder / name for name in with_templates(self.folder, os.listdir(self.folder))]

    def check_unchanged(self) -> None:
        """Raise InputError if a file has changed since the checkpoint was opened. Call this before
        publishing.
        """
        changes = []
        after = file_states(self.states)
        for path, state in self.states.items():
            if path not in after:
                changes.append(f"{path.name}: removed")
            elif after[path][:2] != state[:2]:  # device and inode
                changes.append(f"{path.name}: replaced by another file")
            elif after[path] != state:
                changes.append(f"{path.name}: written to")
        if changes:
            raise InputError(
                f"{self.origin}: {len(changes)} of its files changed during the run, so no output"
                " was kept; run again when nothing writes to them",
                changes,
            )

    def close(self) -> None:
        self.reader.close()
