"""The files beside the weights that a trained checkpoint repeats: read before the first step, written after the last.

A file that cannot be read, or is a link out of the checkpoint, must end a run before it trained, and a file that
changes meanwhile must not change what was checked: their contents are held in memory from the start.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.convert.checkpoint.file_bytes import write_file
from kvfold.convert.checkpoint.folder import RECORD, parse_json, raise_problems, read_bytes, resolve_member
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import InputError

_CARD = "README.md"


@dataclass(frozen=True)
class SideFiles:
    """``copied`` files by name, the ``record`` of the conversion, and the text of the model card, None without one."""

    copied: dict[str, bytes]
    record: dict[str, Any]
    card: str | None

    def write(self, folder: Path) -> None:
        """Write the copied files into ``folder``."""
        for name, data in self.copied.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_file(folder / name, data)


def read_side_files(source: Checkpoint) -> SideFiles:
    """Config, tokenizer, license and Python files, ``kvfold.json`` and the card of ``source``.

    Raises InputError, with every problem at once, when one is a link out of the folder, no file, or not in its format.
    """
    names = [
        "config.json",
        *(str(path.relative_to(source.folder)) for path in source.extra_files()),
        *(p.name for p in source.python_files()),
    ]
    own = [name for name in (RECORD, _CARD) if os.path.lexists(source.folder / name)]
    contents: dict[str, bytes] = {}
    problems = []
    for name in dict.fromkeys([*names, *own]):
        try:
            contents[name] = read_bytes(resolve_member(source.folder, name))
        except InputError as error:
            problems.append(error.message)
    raise_problems(problems)
    record = parse_json(source.folder / RECORD, contents[RECORD]) if RECORD in contents else {"format": 2}
    card = _text(source.folder / _CARD, contents[_CARD]) if _CARD in contents else None
    return SideFiles({name: contents[name] for name in names}, record, card)


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: expected text in UTF-8, found a byte that is none at {error.start}; save it as UTF-8 or remove it"
        ) from None
