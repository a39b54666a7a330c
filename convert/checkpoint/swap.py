"""Put a finished folder in its place in one step, and make it last: fsync, rename, exchange."""

import ctypes
import errno
import os
from pathlib import Path

from kvfold.convert.checkpoint.file_bytes import sync_path

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below ``folder``, innermost first, and the folder itself."""
    for current, _, files in os.walk(folder, topdown=False):
        for file in files:
            sync_path(Path(current, file))
        sync_path(Path(current))


def place(new: Path, target: Path) -> None:
    """Rename ``new`` to ``target``, which must not exist: FileExistsError otherwise."""
    if not _renameat2(new, target, _NOREPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(new, target)
    sync_path(target.parent)


def replace(new: Path, target: Path, backup: Path) -> None:
    """Put ``new`` in the place of the folder ``target``.

    One atomic exchange where the system has it: the old folder is then called ``new``. Elsewhere the old folder goes to
    ``backup`` first; a run that finds ``backup`` without ``target`` puts it back (``put_back``).
    """
    if not _renameat2(new, target, _EXCHANGE):
        os.rename(target, backup)
        sync_path(target.parent)
        os.rename(new, target)
    sync_path(target.parent)


def put_back(backup: Path, target: Path) -> None:
    """Undo half a replacement: ``backup`` becomes ``target`` again when there is no ``target``."""
    if os.path.lexists(backup) and not os.path.lexists(target):
        os.rename(backup, target)
        sync_path(target.parent)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Linux's renameat2; False where the C library, the kernel or the file system lacks it (or the flag)."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(target))
