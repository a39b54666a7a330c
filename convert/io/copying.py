"""Move bytes between open files at given positions.

Through a small buffer, on purpose: source and target positions rarely agree modulo the page size (headers differ), and
copy_file_range then splits every page. Measured on ext4 (Linux 6.18), CPU seconds per GB, positions that disagree:
copy_file_range 0.36 to 0.49, buffers of 128 KiB 0.35 to 0.43, of 512 KiB to 1 MiB 0.26 to 0.30, of 4 MiB 0.31 to 1.4.
"""

import os
from collections.abc import Callable

BUFFER = 1 << 20


class SourceEnded(Exception):
    """The source file is shorter than it was when its header was read."""


def copy_range(
    source: int, start: int, target: int, position: int, length: int, progress: Callable[[int], None]
) -> None:
    """Copy ``length`` bytes from ``start`` of one open file to ``position`` of another.

    Calls ``progress`` with the number of bytes of every step. SourceEnded when the source is too short.
    """
    buffer = memoryview(bytearray(min(BUFFER, length)))
    done = 0
    while done < length:
        count = os.preadv(source, [buffer[: length - done]], start + done)
        if count == 0:
            raise SourceEnded
        write_all(target, buffer[:count], position + done)
        done += count
        progress(count)


def write_all(target: int, data: memoryview, position: int) -> None:
    """Write every byte of ``data`` at ``position``: one call takes at most 2 GiB."""
    written = 0
    while written < len(data):
        written += os.pwrite(target, data[written : written + (1 << 30)], position + written)
