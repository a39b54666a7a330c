"""What the measuring scripts share: the date and the machine, and JSON files of rows that several
runs complete.
"""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kvfold.convert.measure.bench import read_processor_name

_CPU = torch.device("cpu")
# Of a benchmark: names and values.
Row = dict[str, Any]


def conditions(device: torch.device = _CPU) -> dict[str, Any]:
    """The current ``date``, ``machine`` (including its load average) and software ``versions``."""
    packages = {name: metadata.version(name) for name in ("kvfold", "transformers")}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {
            "processor": read_processor_name(device),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "load_average": os.getloadavg()[0],
            "kernel": platform.release(),
        },
        # The metadata of some builds of torch lack the "+cu124" that tells them apart.
        "versions": {"python": platform.python_version(), **packages, "torch": torch.__version__},
    }


def commit() -> str:
    """The commit of this repository, "+" behind it where files differ from it; "unknown" for a copy
    without history.
    """
    return (
        output(
            "git",
            "-C",
            str(Path(__file__).parent),
            "describe",
            "--always",
            "--dirty=+",
            "--exclude=*",
        )
        or "unknown"
    )


def output(*command: str) -> str:
    """What ``command`` prints; nothing if it fails or is not there."""
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def continue_rows(
    path: Path | None,
    header: Row,
    rows: Callable[[list[Row]], Iterator[Row]],
    show: Callable[[Row], None],
) -> None:
    """Measure the rows that are missing from the JSON file ``path``, and rewrite the file after
    each.

    ``rows(done)`` yields the rows that are not in ``done``; ``show`` prints a row. The file
    contains ``header`` and all ``rows``; without a ``path``, rows are only printed.
    """
    done = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    for row in done:
        show(row)
    for row in rows(list(done)):
        show(row)
        done.append(row)
        if path is not None:
            path.write_text(json.dumps({**header, "rows": done}, indent=1) + "\n")
