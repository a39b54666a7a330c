"""Time and memory, by the device's own means: CUDA events and torch's counters, or the process's clock and pages."""

import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Clock:
    """Marks points in time; on CUDA these are events, so that no queue is emptied for a mark."""

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


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) << 10
    return 1 << 62  # a system that does not say


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # then the peak is that of the whole process


def peak_memory(device: torch.device) -> int:
    """Bytes: torch's on CUDA, else the pages of the process, since ``reset_peak``."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    for line in _lines("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def vendor(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
