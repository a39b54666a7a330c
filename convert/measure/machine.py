"""The machine, the versions and the date that a measurement holds for: what every file of results says of itself."""

import datetime
import os
import platform
from importlib import metadata
from typing import Any

import torch

from kvfold.convert.measure.clock import file_lines

_PACKAGES = ("kvfold", "torch", "transformers")
_CPU = torch.device("cpu")


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
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide how fast a model runs."""
    return {"python": platform.python_version()} | {package: _version(package) for package in _PACKAGES}


def _version(package: str) -> str:
    try:
        return torch.__version__ if package == "torch" else metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def processor(device: torch.device = _CPU) -> str:
    """The name of the GPU or of the CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    for line in file_lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
