"""Time and memory of a device: CUDA events and torch's counters, or the clock and the pages of the process."""

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


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
        """Seconds."""
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
    if clock.time(call) > seconds:
        warm, fewest = 1, min(fewest, 3)
    for _ in range(warm - 1):
        call()
    times: list[float] = []
    while len(times) < fewest or (len(times) < most and sum(times) < seconds):
        times.append(clock.time(call))
    return times


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in file_lines("/proc/meminfo"):
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) << 10
    return 1 << 62  # unknown


def reset_peak(device: torch.device) -> None:
    """Reset what ``peak_memory`` returns; without permission it stays that of the whole process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory(device: torch.device) -> int:
    """Bytes: torch's on CUDA, else the pages of the process, since ``reset_peak``."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    for line in file_lines("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def file_lines(path: str) -> list[str]:
    """The lines of a file of the system; empty where there is none."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
