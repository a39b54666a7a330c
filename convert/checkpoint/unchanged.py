"""Whether the files of a checkpoint still are the ones that were opened.

A run reads headers first and weights over hours. A file that is replaced or rewritten meanwhile, with another header
length or other weights, would give a result that belongs to neither version.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple


class FileState(NamedTuple):
    """What a file that was replaced or rewritten does not keep."""

    device: int
    inode: int
    size: int
    mtime_ns: int


def file_states(paths: Iterable[Path]) -> dict[Path, FileState]:
    """The state of each file; take it before reading them. Files that cannot be found are left out."""
    return {path: state for path in paths if (state := _state(path)) is not None}


def changed_files(states: Mapping[Path, FileState]) -> list[str]:
    """A line for every file that is gone, another file, or of another size or time than in ``states``."""
    return [f"{path.name}: {how}" for path, before in states.items() if (how := _change(before, _state(path)))]


def _state(path: Path) -> FileState | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _change(before: FileState, after: FileState | None) -> str:
    if after is None:
        return "removed"
    if (before.device, before.inode) != (after.device, after.inode):
        return "replaced by another file"
    return "" if before == after else "written to"
