"""Read, copy, write and sync the bytes and JSON of files. Does not import torch."""

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from kvfold.convert.errors import ADVICE, InputError, one_line

# A small buffer, which fits a cache of the processor.
BUFFER = 1 << 20
# Bytes that the kernel copies in one call, or that are mapped and hashed at once. A thread that
# imports torch gives the interpreter's lock away every 5 ms or later, so smaller steps mostly wait
# for it: during the import, steps of 64 MiB copied 1.8 GB and hashed 1.7, of 1 MiB 0.4 and 0.7
# (ext4, Linux 6.18, two busy cores, 2026-11-24). An interrupted run ends after the step, so they
# are not larger.
AT_ONCE = 32 << 20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a surrogate pair as JSON spells it
_DTYPE_KEYS = ("dtype", "torch_dtype")


def open_source(path: Path) -> FileIO:
    """Open a regular file for unbuffered reading. Raises InputError if it is none or cannot be
    read.
    """
    try:
        # a pipe would block until somebody writes into it, and a device may never end
        file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except OSError as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise InputError(f"{path} must be a regular file; replace it with one")
    return file


def read_bytes(path: Path, start: int = 0, length: int = -1) -> bytes:
    """Read up to ``length`` bytes of a file from ``start``; -1 means all. Raises InputError if it
    cannot be read.
    """
    with open_source(path) as file:
        try:
            file.seek(start)
            return file.read(length)
        except OSError as error:
            raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> InputError:
    way_out = ADVICE.get(error.errno or 0, "make it readable or download it again")
    return InputError(f"{path} cannot be read ({error.strerror}); {way_out}")


def read_parts(file: FileIO, start: int, end: int, size: int = BUFFER) -> Iterator[memoryview]:
    """Yield the bytes ``start`` to ``end`` in parts, each valid until the next. InputError if the
    file is too short.
    """
    buffer = memoryview(bytearray(min(size, max(end - start, 0))))
    while start < end:
        count = os.preadv(file.fileno(), [buffer[: end - start]], start)
        if count == 0:
            raise InputError(
                f"{file.name!s} ends before byte {end}: it changed while it was read; run again"
            )
        yield buffer[:count]
        start += count


def copy_range(
    source: FileIO,
    start: int,
    end: int,
    target: int,
    position: int,
    copied: Callable[[int, int], None],
) -> None:
    """Copy bytes of one open file to ``position`` in another, by the kernel if it can.

    ``copied`` is called with the first and last position in ``source`` of each step.
    """
    done = start
    while done < end:
        stop = min(done + AT_ONCE, end)
        place = position + done - start
        try:
            count = os.copy_file_range(source.fileno(), target, stop - done, done, place)
        except (AttributeError, OSError):  # macOS has no such call, and some file systems refuse it
            count = 0
        if count == 0:  # read and written instead, so that an error says which of the two fails
            for part in read_parts(source, done, stop):
                write_all(target, part, place + count)
                count += len(part)
        copied(done, done + count)
        done += count


def drop_cached(path: Path, start: int, end: int) -> None:
    """Drop bytes of a file that nobody reads again from the page cache.

    The dropped pages serve the next reads, and a model larger than the memory does not push
    everything else out.
    """
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with open_source(path) as file:
            os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def write_all(target: int, data: memoryview, position: int) -> None:
    """Write all of ``data`` at ``position`` in an open file."""
    written = 0
    while written < len(data):
        # one call takes at most 2 GiB
        written += os.pwrite(target, data[written : written + (1 << 30)], position + written)


def write_file(path: Path, content: bytes | str) -> None:
    """Write a small file; text is encoded as UTF-8. Unlike Python's own OSError, the one raised
    here names the file.
    """
    rest = memoryview(content.encode() if isinstance(content, str) else content)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        # a call may write less than it was given, and only the next one tells that the disk is full
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(file)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield ``path`` with ".new" appended: the file that the block writes there replaces ``path``
    when the block ends.

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
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # fsync does not say which
    finally:
        os.close(handle)


def load_json(data: bytes, **options: Any) -> Any:
    """Parse bytes as JSON in UTF-8 with valid Unicode strings. Raises ValueError or RecursionError
    with the reason.
    """
    value = json.loads(data.decode("utf-8"), **options)
    # JSON can spell half of a surrogate pair, and Python reads it, but it can be neither printed
    # nor written later
    if _SURROGATE.search(data):
        check_unicode(json.dumps(value, ensure_ascii=False))
    return value


def check_unicode(text: str) -> None:
    """Raise ValueError if ``text`` contains half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise ValueError(
            f"it contains half of a surrogate pair, \\u{half:04x}, which is not a character"
        ) from None


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    """Parse the bytes of the file ``path`` as a JSON object. Raises InputError with the file's name
    if they are not.
    """
    try:
        value = load_json(data)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: not valid JSON: {one_line(error)}; fix the file or download it again"
        ) from None
    if not isinstance(value, dict):
        raise InputError(
            f"{path} must contain a JSON object, not a {type(value).__name__}; fix the file or"
            " download it again"
        )
    return value


def dump(value: Mapping[str, Any]) -> str:
    """``value`` as JSON in the style of transformers' configs: two-space indentation, unsorted, a
    final newline.
    """
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A copy of ``config`` with ``dtype`` under its dtype keys ("dtype" if it has none), in nested
    configs too.
    """
    changed = {
        name: with_dtype(value, dtype)
        for name, value in config.items()
        if isinstance(value, Mapping) and any(key in value for key in _DTYPE_KEYS)
    }
    # older and newer readers know one key each: both stay where both are
    present = [key for key in _DTYPE_KEYS if key in config] or ["dtype"]
    return {**config, **changed, **dict.fromkeys(present, dtype)}


def recorded_name(source: str) -> str:
    """A model or text for records: local files and folders by name, without their path, and others
    as they are.
    """
    return portable_name(Path(source).resolve()) if Path(source).exists() else source


def portable_name(path: Path) -> str:
    """The last component of a path, for records. Each byte that is not UTF-8 becomes a replacement
    character.
    """
    return os.fsencode(path.name).decode("utf-8", "replace")
