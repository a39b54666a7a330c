"""An output folder that appears either complete or not at all, even if the process that writes it
is killed.

The work happens in ``.OUT.kvfold-<token>``, in OUT's parent folder, under a lock on
``.OUT.kvfold.lock``. Only a killed process leaves them behind; the next run that acquires the lock
treats them as stale.
"""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvfold.convert.checkpoint.digests import read_hashes
from kvfold.convert.checkpoint.files import RECORD, STEP, list_files
from kvfold.convert.checkpoint.opening import resolve_local_folder
from kvfold.convert.errors import InputError
from kvfold.convert.formatting import format_bytes
from kvfold.convert.signals import DeferredSignals

_LOCKLESS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_TOKEN = r"-[0-9a-f]{8}(\.old)?$"
_ASIDE = ".old"
_LONGEST_NAME = 255 - len(".") - len(".kvfold-12345678") - len(_ASIDE)  # bytes
# of Linux's renameat2
_AT_FDCWD = -100
_EXCHANGE = 2


def resolve_output_path(
    out: str | os.PathLike[str],
    *,
    overwrite: bool | None = False,
    model: str | os.PathLike[str] | None = None,
) -> Path:
    """Return the real path of the output folder OUT after checking that a run may write it; nothing
    on disk changes. ``model`` is MODEL's folder or hub id. ``overwrite`` is None for a command that
    has no option --overwrite.

    Raises InputError if MODEL is neither a folder nor a hub id; if OUT exists and is neither an
    empty folder nor, with ``overwrite``, a folder with a ``kvfold.json`` that lists all its files;
    if OUT is a mount point; if OUT and MODEL overlap; or if the nearest existing parent is not a
    writable folder (missing parents are created later).
    """
    try:
        target = Path(out).resolve()
    except (RuntimeError, ValueError) as error:  # links in a circle, a NUL character
        raise InputError(
            f"{out} cannot be an output folder ({error}); choose another OUT"
        ) from None
    # before OUT: where MODEL is missing, an existing OUT may be a mistake of the same kind
    source = None if model is None else resolve_local_folder(model)
    # an OUT inside MODEL would become part of what is read; replacing an OUT around MODEL would
    # remove MODEL
    if source and (target.is_relative_to(source) or source.is_relative_to(target)):
        raise InputError(
            f"OUT ({target}) must not be MODEL ({source}), inside it or around it; choose another"
            " OUT"
        )
    if len(os.fsencode(target.name)) > _LONGEST_NAME:
        raise InputError(
            f"{target}: its name is too long for the temporary folder beside it; choose an OUT of"
            f" at most {_LONGEST_NAME} bytes"
        )
    if os.path.lexists(target):
        _check_replaceable(target, overwrite)
    parent = next(path for path in target.parents if os.path.lexists(path))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(
            f"{target} cannot be created: {parent} is not a writable folder; choose another OUT"
        )
    return target


def _check_replaceable(target: Path, overwrite: bool | None) -> None:
    """Raise InputError unless the existing path ``target`` may be replaced: it must be an empty
    folder or, with ``overwrite``, a folder with only files that kvfold wrote.
    """
    try:
        names = os.listdir(target)
    except OSError:
        raise InputError(
            f"{target} exists and is not a readable folder; choose another OUT"
        ) from None
    shared = target.parent.stat()
    if shared.st_mode & stat.S_ISVTX and os.geteuid() not in (
        0,
        shared.st_uid,
        target.lstat().st_uid,
    ):
        raise InputError(
            f"{target} belongs to another user and cannot be replaced in {target.parent}; choose"
            " another OUT"
        )
    if os.path.ismount(target):
        raise InputError(
            f"{target} is a mount point, which cannot be replaced; choose a folder inside it"
        )
    if not names:
        return
    recorded: dict[str, str] = {}
    # kvfold writes no links: a snapshot in the hub cache has them
    if not (target / RECORD).is_symlink():
        with suppress(InputError):
            recorded, _ = read_hashes(target)
    if not recorded:
        raise InputError(
            f"{target} already exists, and kvfold did not write it (no {RECORD} with a list of"
            " files), so it is never replaced; choose another OUT (are MODEL and OUT swapped?)"
        )
    if not overwrite:
        advice = "remove it" if overwrite is None else "use --overwrite"
        raise InputError(f"{target} already exists; choose another OUT, or {advice}")
    foreign_files = {*list_files(target)} - {*recorded, RECORD, ".gitattributes"}
    if foreign_files:
        raise InputError(
            f"{target} contains {min(foreign_files)}, which kvfold did not write; move what you"
            " need elsewhere, or choose another OUT"
        )


@contextmanager
def open_output_folder(
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    model: str | os.PathLike[str] | None = None,
    resume: Callable[[Path], bool] | None = None,
    fresh: bool = False,
) -> Iterator[Path]:
    """Yield a temporary folder for the output files. When the with-block ends, the folder is
    renamed to OUT; if the block raises an error, it is removed.

    On success, the folder is synced and renamed to OUT; with ``overwrite``, an existing OUT stays
    intact until the two are exchanged. Folders that killed runs left behind for this OUT are
    removed, except the newest one that ``resume(folder)`` accepts: it is yielded instead of a new
    one. If the block raises, the folder is kept for a later run if ``resume`` accepts it; with
    ``fresh``, earlier ones are removed in any case. Raises InputError as ``resolve_output_path``
    does, and if another process is writing OUT.
    """
    target = resolve_output_path(out, overwrite=overwrite, model=model)
    with DeferredSignals() as signals, lock_output(target) as locked:
        pattern = re.compile(re.escape(f".{target.name}.kvfold") + _TOKEN)
        # without locks, the folder of a run at work could not be told from that of a killed one
        stale = [
            Path(entry.path)
            for entry in os.scandir(target.parent)
            if locked and pattern.fullmatch(entry.name)
        ]
        stale.sort(key=lambda path: path.lstat().st_mtime, reverse=True)
        for path in stale:
            _finish_replacement(path, target)
        # once more: OUT may have appeared while nobody held the lock, or just now, back from a
        # replacement cut short
        resolve_output_path(out, overwrite=overwrite, model=model)
        folder = _choose_work_folder(target, stale, None if fresh else resume)
        try:
            signals.deliver()
            yield folder
            # all bytes first: a rename that reached the disk before them would show a whole
            # checkpoint of empty files
            for current, _, files in os.walk(folder, topdown=False):
                for file in files:
                    sync_path(Path(current, file))
                sync_path(Path(current))
            signals.deferred = True  # from here on OUT's old and new folder may have changed places
            _move_to_target(folder, target, overwrite)
            resume = None
        finally:
            signals.deferred = True
            _finish_replacement(folder.with_name(folder.name + _ASIDE), target)
            if resume is None or not resume(folder):
                # OUT's predecessor after an exchange
                shutil.rmtree(folder, ignore_errors=True)


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raise InputError if the disk of ``folder`` has fewer than ``needed_bytes`` for its files.
    Bytes that an interrupted run has already written there count as free.
    """
    # in blocks, since the holes of sparse shards take no room
    written = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + written
    if needed_bytes > free:
        raise InputError(
            f"{folder.parent}: too little disk space: {format_bytes(free)} ({free} bytes) free, but"
            f" {format_bytes(needed_bytes)} ({needed_bytes} bytes) needed; free some or choose an"
            " OUT on another disk"
        )


@contextmanager
def lock_output(target: Path) -> Iterator[bool]:
    """Hold a lock on the output folder ``target`` during the with-block. Yields True, or False if
    the file system does not support locks. Raises InputError if another run holds the lock.

    The missing folders above ``target`` are created first; those that stay empty are removed after
    the block.
    """
    # The package filelock would not do: it leaves its file behind, and without locks puts a file in
    # their place that blocks every run after a killed one.
    path = target.parent / f".{target.name}.kvfold.lock"
    with DeferredSignals() as signals:
        try:
            missing = [parent for parent in target.parents if not parent.exists()]
            target.parent.mkdir(parents=True, exist_ok=True)
            # a new name survives a power cut once the folder that holds it is synced, not before
            for parent in missing:
                sync_path(parent.parent)
            handle = _open_lock_file(path)
        except BlockingIOError:
            raise InputError(
                f"{target} is being written by another run; wait until it ends"
            ) from None
        except OSError as error:
            raise InputError(
                f"{target} cannot be created in {target.parent} ({error.strerror}); choose another"
                " OUT"
            ) from None
        try:
            signals.deliver()
            yield handle is not None
        finally:
            signals.deferred = True
            if handle is not None:
                path.unlink(missing_ok=True)
                os.close(handle)
            for parent in missing:
                with suppress(OSError):  # not empty: OUT is there, or a run that can be resumed
                    parent.rmdir()


def _open_lock_file(path: Path) -> int | None:
    """Open and lock the file ``path``. Returns its file descriptor, or None if the file system does
    not support locks. Raises BlockingIOError if another process holds the lock.
    """
    while True:
        # OUT may lie in a folder that others write to, such as /tmp: no link is followed there
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # its last holder may have removed the file between our open and our lock
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    return handle
        except OSError as error:
            os.close(handle)
            if error.errno in _LOCKLESS:
                return None
            raise
        os.close(handle)


def _choose_work_folder(
    target: Path, stale: list[Path], resume: Callable[[Path], bool] | None
) -> Path:
    """Return the temporary folder for a run: the first of the folders ``stale``, left behind by
    killed runs, that ``resume`` accepts, otherwise a new one. The other stale folders are removed.
    """
    chosen = None
    for path in stale:
        if chosen is None and path.is_dir() and resume is not None and resume(path):
            chosen = path
        else:
            shutil.rmtree(path, ignore_errors=True)
    if chosen is None:
        chosen = target.parent / f".{target.name}.kvfold-{secrets.token_hex(4)}"
        chosen.mkdir()
    return chosen


def _finish_replacement(path: Path, target: Path) -> None:
    """Clean up after a run that was killed while it replaced OUT. If OUT (``target``) is missing,
    its old version at ``path`` is moved back; otherwise that version is deleted.
    """
    if path.name.endswith(_ASIDE):
        if os.path.lexists(path) and not os.path.lexists(target):
            os.rename(path, target)
            sync_path(target.parent)
        shutil.rmtree(path, ignore_errors=True)


def _move_to_target(folder: Path, target: Path, overwrite: bool) -> None:
    """Move the finished ``folder`` to ``target``, replacing what is there if ``overwrite``, and
    flush the parent folder to disk.
    """
    if overwrite and os.path.lexists(target):
        _check_replaceable(target, overwrite)  # another program may have put something there
        # Without an atomic exchange, a run that finds the old OUT aside but no OUT moves it back.
        if not _exchange_folders(folder, target):
            os.rename(target, folder.with_name(folder.name + _ASIDE))
            sync_path(target.parent)
            os.rename(folder, target)
    else:
        try:
            os.rename(folder, target)  # an empty folder gives way, nothing else does
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise InputError(
                f"{target} was created by another program during the run; choose another OUT"
            ) from None
    sync_path(target.parent)


def _exchange_folders(source: Path, target: Path) -> bool:
    """Exchange the names of two folders atomically with Linux's renameat2. Returns False if the C
    library, the kernel or the file system does not support it.
    """
    function = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target)
    return function is not None and function(*paths, _EXCHANGE) == 0


# Single files


@contextmanager
def open_file(path: Path, flags: int) -> Iterator[int]:
    """Yield the descriptor of a file or folder that was opened with ``flags``, and close it after
    the with-block. Symbolic links are refused. Every OSError from here or from the block contains
    the file's path.
    """
    try:
        # a pipe would block until somebody reads it
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            yield file
        finally:
            os.close(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_bytes_at(file: int, data: memoryview, position: int) -> None:
    """Write all bytes of ``data`` to the open ``file``, beginning at byte ``position``."""
    while data:
        # A call may write less than it was given, and only the next one tells that the disk is
        # full.
        count = os.pwrite(file, data[:STEP], position)
        data = data[count:]
        position += count


def write_small_file(path: Path, content: bytes | str) -> None:
    """Write ``content`` as the whole file ``path``, not atomically; text is encoded as UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    with open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        write_bytes_at(file, memoryview(data), 0)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, ``path`` with the suffix ".new". The file that the with-block writes
    there replaces ``path`` atomically when the block ends.

    A kill meanwhile leaves the old file, if any, and part of the new one; an exception leaves only
    the old file.
    """
    new = path.with_name(path.name + ".new")
    try:
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Flush one file or folder to disk with fsync."""
    with open_file(path, os.O_RDONLY) as file:
        os.fsync(file)
