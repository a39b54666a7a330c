"""Bytes of files: copied between positions, written and synced. No torch."""

import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from kvfold.convert.errors import InputError

# A small buffer, which fits the second-level cache. copy_file_range would be no faster: source and target positions
# rarely agree modulo the page size (headers differ), and it then splits every page. Measured on ext4 (Linux 6.18, 2
# cores), system seconds per GB: copy_file_range 0.4 to 0.5; buffers of 1 MiB 0.6 to 0.8, of 8 MiB 1.7 to 1.9; 1 MiB
# with dropping what was read from the page cache 0.3.
BUFFER = 1 << 20
# A conversion reads a source once: dropped pages serve the next reads, and a model larger than the memory does not push
# everything else out.
_DROP_EVERY = 8 << 20


def open_source(path: Path) -> FileIO:
    """An open file of a source, unbuffered. InputError if it cannot be read any more."""
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise InputError(f"{path}: expected to be able to read it, found: {error.strerror}") from None


def copy_range(
    source: int, start: int, target: int, position: int, length: int, progress: Callable[[int], None]
) -> None:
    """Copy ``length`` bytes from ``start`` of one open file to ``position`` of another.

    Calls ``progress`` with the number of bytes of every step. Raises EOFError if the source is too short.
    """
    buffer = memoryview(bytearray(min(BUFFER, length)))
    done = dropped = 0
    while done < length:
        count = os.preadv(source, [buffer[: length - done]], start + done)
        if count == 0:
            raise EOFError
        write_all(target, buffer[:count], position + done)
        done += count
        progress(count)
        if done - dropped >= _DROP_EVERY or done == length:
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(source, start, done, os.POSIX_FADV_DONTNEED)
            dropped = done


def write_all(target: int, data: memoryview, position: int) -> None:
    """Write every byte of ``data`` at ``position`` of an open file."""
    written = 0
    while written < len(data):
        # one call takes at most 2 GiB
        written += os.pwrite(target, data[written : written + (1 << 30)], position + written)


def write_file(path: Path, content: bytes | str) -> None:
    """Write a small file, text as UTF-8. Unlike the system's own, the OSError of a full disk names the file."""
    rest = memoryview(content.encode() if isinstance(content, str) else content)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        while rest:  # a call may write less than it was given, and only the next one tells that the disk is full
            rest = rest[os.write(file, rest) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(file)


def sync_path(path: Path) -> None:
    """fsync one file or folder."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # fsync does not say which
    finally:
        os.close(handle)
