"""An output folder that appears complete or not at all, even when the process that makes it is killed.

The work happens in ``.OUT.kvfold-<token>`` beside OUT, under a lock on ``.OUT.kvfold.lock``. Only a killed process
leaves either behind; the next run that gets the lock knows that they are stale.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvfold.convert.checkpoint.file_bytes import sync_path
from kvfold.convert.checkpoint.replaceable import replaceable_problem
from kvfold.convert.checkpoint.swap import place, put_back, replace, sync_tree
from kvfold.convert.errors import InputError
from kvfold.convert.signals import DeferredSignals
from kvfold.convert.sizes import bytes_text

_LOCKLESS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_TOKEN = re.compile(r"-[0-9a-f]{8}(\.old)?$")
_ASIDE = ".old"


def check_output(
    out: str | os.PathLike[str], *, overwrite: bool = False, model: str | os.PathLike[str] | None = None
) -> Path:
    """The real path of OUT, when it may be written; touches nothing. ``model`` may be a hub id, which is no folder.

    InputError: OUT exists, is no empty folder, and ``overwrite`` is off, or it is no folder, a mount point, or a folder
    with something in it that is no part of a checkpoint (which ``overwrite`` must not throw away); OUT and MODEL inside
    each other; a parent (those that are missing will be made) that is no folder or not writable.
    """
    target = _resolved(out)
    if model is not None and os.path.isdir(model):
        _check_apart(target, Path(model).resolve())
    if os.path.lexists(target):
        _check_replaceable(target, overwrite)
    parent = next(path for path in target.parents if os.path.lexists(path))
    if not parent.is_dir():
        raise InputError(
            f"{target}: expected a folder {parent} to write it in, found something else; choose another OUT"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{target}: expected to be allowed to write in {parent}, found it not writable")
    return target


def _resolved(out: str | os.PathLike[str]) -> Path:
    """The real path of OUT, which need not exist but must be possible."""
    try:
        target = Path(out).resolve()
        os.lstat(target)
    except (FileNotFoundError, NotADirectoryError):
        return target
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, links in a circle, a NUL character
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{out}: expected a path to write to, found: {reason}; choose another OUT") from None
    return target


def _check_apart(target: Path, model: Path) -> None:
    if target == model:
        raise InputError(f"{target}: expected OUT apart from MODEL, found the same folder; choose another OUT")
    if target.is_relative_to(model):
        raise InputError(f"{target}: expected OUT outside MODEL, found it inside {model}; choose another OUT")
    if model.is_relative_to(target):
        raise InputError(f"{target}: expected OUT apart from MODEL, found MODEL {model} inside it; choose another OUT")


def _check_replaceable(target: Path, overwrite: bool) -> None:
    if not overwrite and not _is_empty_folder(target):
        raise InputError(f"{target}: expected no such path, found that it exists; choose another OUT or --overwrite")
    if not target.is_dir():
        raise InputError(f"{target}: expected a folder to overwrite, found a file; choose another OUT")
    if os.path.ismount(target):
        raise InputError(f"{target}: expected a folder that can be replaced, found a mount point; choose one inside it")
    if found := replaceable_problem(target):
        raise InputError(f"{target}: expected a checkpoint to overwrite, {found}; remove it yourself if it can go")


def _is_empty_folder(path: Path) -> bool:
    try:
        return not os.listdir(path)
    except OSError:  # a file, or a folder that nothing may list
        return False


@contextmanager
def _parents(target: Path) -> Iterator[None]:
    """Make the missing folders above ``target``; when the block raises, those that are empty are removed again."""
    missing = [path for path in target.parents if not path.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_path(path.parent)
    except OSError as error:
        raise _not_writable(target, error) from None
    try:
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):  # not empty: a run that can be resumed, or someone else's files
                path.rmdir()
        raise


@contextmanager
def output_folder(
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    model: str | os.PathLike[str] | None = None,
    resume: Callable[[Path], bool] | None = None,
) -> Iterator[Path]:
    """A temporary folder that becomes OUT when the block ends, and is removed when it raises.

    On success it is synced and renamed; with ``overwrite`` an existing OUT stays intact until then and is exchanged.
    Folders that killed runs left for this OUT are removed, but the first one for which ``resume(folder)`` is true is
    the one yielded. When the block raises, the folder stays for a later run if ``resume(folder)`` is true.
    InputError as in ``check_output``, and when another process is writing the same OUT.
    """
    target = check_output(out, overwrite=overwrite, model=model)
    with DeferredSignals() as signals, _parents(target), output_lock(target) as locked:
        stale = _stale(target) if locked else []
        for path in stale:
            _complete_replacement(path, target)
        check_output(out, overwrite=overwrite, model=model)
        folder = _resumed(stale, resume) or _fresh(target)
        published = False
        try:
            signals.deliver()
            yield folder
            sync_tree(folder)
            signals.deferred = True
            _publish(folder, target, overwrite)
            published = True
        finally:
            signals.deferred = True
            _complete_replacement(_backup(folder), target)
            if published or resume is None or not resume(folder):
                shutil.rmtree(folder, ignore_errors=True)  # OUT's predecessor after an exchange


def free_space_check(path: str | os.PathLike[str], needed_bytes: int, purpose: str = "") -> None:
    """InputError with both figures when the disk of ``path`` (or of its first existing parent) has less room.

    ``purpose``, such as "for tokens", is added to the message. The bytes in a resumed ``path`` count as free. Call it
    inside ``output_folder``, which removes stale folders.
    """
    target = Path(path).resolve()
    existing = next(parent for parent in (target, *target.parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free + (_allocated(target) if _TOKEN.search(target.name) else 0)
    if needed_bytes > free:
        required, available = (f"{bytes_text(count)} ({count} bytes)" for count in (needed_bytes, free))
        figures = f"expected {required} free{purpose and ' ' + purpose}, found {available}"
        raise InputError(f"{existing}: too little disk space: {figures}; free some, or choose an OUT on another disk")


def _allocated(folder: Path) -> int:
    """Bytes of disk that the files of a folder take; holes take none."""
    return sum(os.stat(Path(root, file)).st_blocks * 512 for root, _, files in os.walk(folder) for file in files)


@contextmanager
def output_lock(target: Path) -> Iterator[bool]:
    """Hold the lock of ``target``; False where the file system has no locks. InputError when another process has it.

    By hand because nothing may be left beside OUT: filelock keeps its file, and without locks puts a file in their
    place that blocks every run after a killed one.
    """
    path = target.parent / f"{_prefix(target)}.lock"
    with DeferredSignals() as signals:
        handle = _locked(path, target)
        try:
            signals.deliver()
            yield handle is not None
        finally:
            signals.deferred = True
            if handle is not None:
                path.unlink(missing_ok=True)
                os.close(handle)


def _locked(path: Path, target: Path) -> int | None:
    """The open lock file, locked; None where the file system has no locks."""
    while True:
        handle = _open_lock(path, target)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in _LOCKLESS:
                return None
            raise InputError(f"{target}: expected no other run to write it, found one at work; wait for it") from None
        if _same_file(handle, path):
            return handle
        os.close(handle)  # its last holder removed it between our open and our lock


def _open_lock(path: Path, target: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise _not_writable(target, error) from None


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _not_writable(target: Path, error: OSError) -> InputError:
    return InputError(f"{target}: expected to be able to write in {target.parent}, found: {error.strerror}")


def _prefix(target: Path) -> str:
    """The prefix of the names beside OUT; a name near the limit of 255 bytes is shortened to a digest."""
    name = os.fsencode(target.name)
    short = target.name if len(name) <= 200 else hashlib.sha256(name).hexdigest()[:32]
    return f".{short}.kvfold"


def _stale(target: Path) -> list[Path]:
    """Folders that killed runs left for ``target``, the newest first."""
    pattern = re.compile(re.escape(_prefix(target)) + _TOKEN.pattern)
    left = [Path(entry.path) for entry in os.scandir(target.parent) if pattern.fullmatch(entry.name)]
    return sorted(left, key=lambda path: path.lstat().st_mtime, reverse=True)


def _fresh(target: Path) -> Path:
    folder = target.parent / f"{_prefix(target)}-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        raise _not_writable(target, error) from None
    return folder


def _resumed(stale: list[Path], resume: Callable[[Path], bool] | None) -> Path | None:
    """The first folder of a killed run that ``resume`` accepts; all others are removed."""
    chosen = None
    for path in stale:
        if chosen is None and path.is_dir() and resume is not None and resume(path):
            chosen = path
        else:
            shutil.rmtree(path, ignore_errors=True)
    return chosen


def _backup(folder: Path) -> Path:
    """The path of the old OUT during a replacement without exchange."""
    return folder.with_name(folder.name + _ASIDE)


def _complete_replacement(path: Path, target: Path) -> None:
    """End a replacement that was cut short: the old OUT goes back if nothing took its place, else it is removed."""
    if path.name.endswith(_ASIDE):
        put_back(path, target)
        shutil.rmtree(path, ignore_errors=True)


def _publish(folder: Path, target: Path, overwrite: bool) -> None:
    if overwrite and os.path.lexists(target):
        replace(folder, target, _backup(folder))
        return
    try:
        if _is_empty_folder(target):
            target.rmdir()
        place(folder, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise InputError(
            f"{target}: expected no such path, found one made during the run; choose another OUT"
        ) from None
