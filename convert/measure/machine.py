"""Measure time and peak memory, and name the processor."""

import platform
import re
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


class Clock:
    """A clock for CPU or CUDA; on CUDA its marks are events, so setting one does not wait for
    queued work.
    """

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
    clock: Clock,
    call: Callable[[], Any],
    seconds: float,
    *,
    warm: int = 2,
    fewest: int = 5,
    most: int = 50,
) -> list[float]:
    """Run ``call`` for about ``seconds``, after ``warm`` untimed calls, and return the seconds of
    each timed call.

    Times between ``fewest`` and ``most`` calls. If one call takes longer than ``seconds``, it is
    timed at most three times, after one untimed call.
    """
    # The first call also compiles, allocates and fills caches, so it never counts.
    if clock.time(call) > seconds:
        warm = 1
        fewest = min(fewest, 3)
    for _ in range(warm - 1):
        call()
    times: list[float] = []
    while len(times) < fewest or (len(times) < most and sum(times) < seconds):
        times.append(clock.time(call))
    return times


def reset_peak(device: torch.device) -> None:
    """Reset ``peak_memory``; without permission, it remains the peak since the process started."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM alone


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes since ``reset_peak``: allocated by torch on CUDA, or resident in the
    process on a CPU.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s*(\d+)", status.read_text() if status.exists() else "")
    # The peak of getrusage cannot be reset.
    return (int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) << 10


def processor(device: torch.device) -> str:
    """The name of the GPU or CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    # platform has no name of the CPU on Linux.
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*\S)", info.read_text()) if info.exists() else []
    return next(iter(names), "") or platform.processor() or platform.machine()
