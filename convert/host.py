"""The machine, without importing torch: free memory, a possible GPU, and threads for computing."""

import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CORE = Path("/sys/devices/system/cpu")
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_MEMORY = Path("/proc/meminfo")
_DEVICES = Path("/dev")
# Without any of these device files torch finds no GPU on Linux: NVIDIA (also Tegra), ROCm, WSL
_GPU_FILES = ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg")
_THREADS = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
# How threads wait: the standard's variable, and those of the two common libraries
_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}


def set_threads() -> None:
    """Set as many threads as there are usable cores, which sleep while they wait, unless the user
    chose. To be called before torch is imported.

    By default OpenMP's threads spin while they wait for one another. If another process has their
    core meanwhile, they burn the time of this one.
    """
    if "torch" in sys.modules:  # too late
        return
    if not _THREADS & os.environ.keys():
        os.environ["OMP_NUM_THREADS"] = str(count_usable_cores())
    if not _WAITING & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ["KMP_BLOCKTIME"] = "0"


def count_usable_cores() -> int:
    """Cores that this process may run on (its affinity), each counted once, and at most its
    cgroups' CPU quota.

    The load of other processes does not count: the same request would then not give the same bytes
    at another time.
    """
    everywhere = range(os.cpu_count() or 1)
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else everywhere
    cores = set()
    for cpu in affinity:
        core = str(cpu)
        # Two threads of one core do not compute faster than one.
        with suppress(OSError):
            core = (_CORE / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        cores.add(core)
    return max(1, min([len(cores), *map(math.ceil, _cpu_quotas())]))


def _cpu_quotas() -> Iterator[float]:
    """The CPU quotas in cores of this process's cgroup (version 2) and of the groups above it."""
    with suppress(OSError):
        own = _GROUPS / _OWN_GROUP.read_text().strip().rpartition("::/")[2]
        for group in (own, *own.parents):
            with suppress(OSError, ValueError):  # "max" is no limit
                quota, period = map(float, (group / "cpu.max").read_text().split())
                yield quota / period


def may_have_gpu() -> bool:
    """False only if torch certainly finds no CUDA device."""
    if platform.system() == "Linux":
        return any(any(_DEVICES.glob(pattern)) for pattern in _GPU_FILES)
    return platform.system() != "Darwin"


def measure_host_memory() -> int | None:
    """Free memory of the host in bytes; None if the system does not report it."""
    try:
        fields = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
