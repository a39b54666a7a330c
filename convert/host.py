"""Facts about the machine without importing torch: the host's free memory, and whether a GPU is possible."""

import platform
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_DEVICES = Path("/dev")
# Without any of these device files torch finds no GPU on Linux: NVIDIA (also Tegra), ROCm, WSL
_GPU_FILES = ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg")


def may_have_gpu() -> bool:
    """False only if torch certainly finds no CUDA device. Does not import torch."""
    system = platform.system()
    if system == "Linux":
        return any(any(_DEVICES.glob(pattern)) for pattern in _GPU_FILES)
    return system != "Darwin"


def host_memory() -> int | None:
    """Free memory of the host in bytes; None if the system does not report it."""
    try:
        fields = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
