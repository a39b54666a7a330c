"""Measuring on this machine: time, peak memory, the conditions that results hold for, and files of measured rows."""

import datetime
import json
import os
import platform
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_CPU = torch.device("cpu")
# Of a benchmark: names and values.
Row = dict[str, Any]


class Clock:
    """Marks points in time; on CUDA these are events, so that a mark does not wait for the queue."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another."""
        if not self.cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def time(self, call: Callable[[], Any]) -> float:
        start = self.mark()
        call()
        return self.between(start, self.mark())


def repeat(
    clock: Clock, call: Callable[[], Any], seconds: float, *, warm: int = 2, fewest: int = 5, most: int = 50
) -> list[float]:
    """Seconds of each call after ``warm`` untimed ones: at least ``fewest`` calls, then until ``seconds`` are spent.

    A call that alone takes longer than ``seconds`` is warmed up once and timed at most three times.
    """
    # The first call also compiles, allocates and fills caches, so it never counts.
    if clock.time(call) > seconds:
        warm, fewest = 1, min(fewest, 3)
    for _ in range(warm - 1):
        call()
    times: list[float] = []
    while len(times) < fewest or (len(times) < most and sum(times) < seconds):
        times.append(clock.time(call))
    return times


def reset_peak(device: torch.device) -> None:
    """Let ``peak_memory`` count from here; without permission to, it stays the peak of the whole process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM alone


def peak_memory(device: torch.device) -> int:
    """Bytes since ``reset_peak``: allocated by torch on CUDA, else resident pages of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s*(\d+)", status.read_text() if status.exists() else "")
    # The peak of getrusage cannot be reset.
    return (int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) << 10


def processor(device: torch.device = _CPU) -> str:
    """The name of the GPU or of the CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    # platform has no name of the CPU on Linux.
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*\S)", info.read_text()) if info.exists() else []
    return next(iter(names), "") or platform.processor() or platform.machine()


def software() -> dict[str, str]:
    """Versions of Python and of the packages that decide how fast a model runs."""
    # The metadata of some builds of torch lack the "+cu124" that tells them apart.
    packages = {name: metadata.version(name) for name in ("kvfold", "transformers")} | {"torch": torch.__version__}
    return {"python": platform.python_version(), **packages}


def conditions(device: torch.device = _CPU) -> dict[str, Any]:
    """``date``, ``machine`` (with the load before the measurement) and ``versions``, as they are now."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {
            "processor": processor(device),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "load_average": os.getloadavg()[0],
            "kernel": platform.release(),
        },
        "versions": software(),
    }


def continue_rows(
    path: Path | None, header: Row, rows: Callable[[list[Row]], Iterator[Row]], show: Callable[[Row], None]
) -> None:
    """Measure what the JSON file ``path`` lacks, and write the file after every row.

    ``rows(done)`` measures the rows that are not among ``done``; ``show`` prints one. The file holds ``header`` and
    all ``rows``; without a ``path`` they are only printed.
    """
    done = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    for row in done:
        show(row)
    for row in rows(list(done)):
        show(row)
        done.append(row)
        if path is not None:
            path.write_text(json.dumps({**header, "rows": done}, indent=1) + "\n")
