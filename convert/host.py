"""The machine, without importing torch: free memory, whether a GPU is possible, and the threads for
computing.
"""

import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# What decides how threads wait: the standard's variable, and those of the two common libraries
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_CORE = Path("/sys/devices/system/cpu")
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MEMORY = Path("/proc/meminfo")
_DEVICES = Path("/dev")
# Without any of these device files torch finds no GPU on Linux: NVIDIA (also Tegra), ROCm, WSL
_GPU_FILES = ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg")


def set_threads() -> None:
    """Set as many threads as `usable_cores`, which sleep while they wait, unless the user chose.
    Before torch's import.

    By default OpenMP's threads spin while they wait for one another. If another process has their
    core meanwhile, they burn the time of this one (bench_threads.py).
    """
    if "torch" in sys.modules:  # too late
        return
    if not any(name in os.environ for name in _THREADS):
        os.environ["OMP_NUM_THREADS"] = str(usable_cores())
    if not any(name in os.environ for name in _WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ["KMP_BLOCKTIME"] = "0"


def usable_cores() -> int:
    """Cores that this process may run on (its affinity), each counted once, and at most its
    cgroups' CPU quota.

    The load of other processes does not count: the same request would then not give the same bytes
    at another time.
    """
    allowed = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = set()
    for cpu in allowed:
        core: object = cpu
        # Two threads of one core do not compute faster than one.
        with suppress(OSError):
            core = (_CORE / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        cores.add(core)
    return max(1, min([len(cores), *map(math.ceil, _quotas())]))


def _quotas() -> Iterator[float]:
    """The CPU quotas of this process's cgroups, versions 1 and 2, in cores."""
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            for group in (path for path in (Path(name), *Path(name).parents)):
                for root in (_GROUPS, _GROUPS / "cpu", _GROUPS / "unified"):
                    folder = root / group.relative_to("/")
                    with suppress(OSError, ValueError):
                        quota, period = map(float, (folder / "cpu.max").read_text().split())
                        yield quota / period
                    with suppress(OSError, ValueError):
                        quota = float((folder / "cpu.cfs_quota_us").read_text())
                        if quota > 0:
                            yield quota / float((folder / "cpu.cfs_period_us").read_text())


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
