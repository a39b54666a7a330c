"""The machine without torch: free memory of the host, and whether it can have a GPU at all."""

import platform
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_DEVICES = Path("/dev")
# Without one of these torch finds no GPU on Linux: NVIDIA's driver (Tegra's too), ROCm's, that of WSL
_GPU_FILES = ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg")


def may_have_gpu() -> bool:
    """Return False where torch is certain to find no CUDA device, without importing it."""
    system = platform.system()
    if system == "Linux":
        return any(any(_DEVICES.glob(pattern)) for pattern in _GPU_FILES)
    return system != "Darwin"


def host_memory() -> int | None:
    """Bytes of the host's memory that a run may still take, None where the system does not say."""
    try:
        fields = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
