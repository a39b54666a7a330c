"""Move bytes between open files at given positions."""

import os
from collections.abc import Callable, Iterator

CHUNK = 64 << 20  # between two calls of progress
_BUFFER = 4 << 20


class SourceEnded(Exception):
    """The source file is shorter than it was when its header was read."""


def copy_range(
    source: int, start: int, target: int, position: int, length: int, progress: Callable[[int], None]
) -> None:
    """Copy ``length`` bytes from ``start`` of one open file to ``position`` of another, inside the kernel where it can.

    Calls ``progress`` with the number of bytes of every step. SourceEnded when the source is too short.
    """
    copied = _copy_in_kernel(source, start, target, position, length, progress)
    for count in _copy_by_buffer(source, start + copied, target, position + copied, length - copied):
        progress(count)


def _copy_in_kernel(
    source: int, start: int, target: int, position: int, length: int, progress: Callable[[int], None]
) -> int:
    """Bytes copied before the system refused (different file systems, old kernels, network mounts): maybe none."""
    done = 0
    while done < length:
        try:
            count = os.copy_file_range(source, target, min(CHUNK, length - done), start + done, position + done)
        except (OSError, AttributeError):  # whatever it is, the plain copy below meets it again and can name it
            return done
        if count == 0:
            return done
        done += count
        progress(count)
    return done


def _copy_by_buffer(source: int, start: int, target: int, position: int, length: int) -> Iterator[int]:
    buffer = memoryview(bytearray(min(_BUFFER, length)))
    done = 0
    while done < length:
        count = os.preadv(source, [buffer[: length - done]], start + done)
        if count == 0:
            raise SourceEnded
        write_all(target, buffer[:count], position + done)
        done += count
        yield count


def write_all(target: int, data: memoryview, position: int) -> None:
    """Write every byte of ``data`` at ``position``: one call takes at most 2 GiB."""
    written = 0
    while written < len(data):
        written += os.pwrite(target, data[written : written + (1 << 30)], position + written)
