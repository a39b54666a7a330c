"""What the stages of gpu_check.py share: the settings of a run, the card and its rates, timers."""

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, wraps
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from measured import Row, commit, conditions, output

from kvfold.convert import Conversion, ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder
from kvfold.convert.measure.machine import Clock, repeat

ROOT = Path(__file__).resolve().parents[2]
# Packages that a stage uses where they are installed; docs/gpu.md says how they travel.
OPTIONAL = ("triton", "accelerate", "flash-mla", "flashinfer-python")


@dataclass(frozen=True)
class Check:
    """A run: the device, whether it is a rehearsal (tiny sizes), the checkpoint to convert, and a
    folder for files.
    """

    device: torch.device
    rehearse: bool
    model: Path
    text: Path | None
    work: Path
    ends: float  # of this stage, on the clock of time.monotonic

    @property
    def left(self) -> float:
        """Seconds until this stage is stopped."""
        return self.ends - time.monotonic()

    @property
    def sample(self) -> dict[str, Any]:
        """The calibration text of a conversion."""
        samples, length = (4, 32) if self.rehearse else (64, 256)
        return {"samples": samples, "seq_len": length, "calibration": self.text and str(self.text)}

    @property
    def splits(self) -> tuple[tuple[int, int], ...]:
        """The sizes of MLA that are measured; smaller ones for the demo's model."""
        return (
            ((24, 8),)
            if self.rehearse or self.model == demo_folder()
            else ((128, 64), (64, 64), (48, 48))
        )

    @property
    def split(self) -> dict[str, Any]:
        """The MLA of conversions that are compared."""
        rank, rope = self.splits[len(self.splits) // 2]
        return {"to": "mla", "kv_rank": rank, "rope_dim": rope}

    def convert(self, out: str, progress: Any = None, **options: Any) -> Conversion:
        """Convert the model to the folder ``out`` in ``work``; ``options`` replace those of
        ``sample``.
        """
        place = {"model": str(self.model), "out": str(self.work / out), "device": self.device.type}
        request = ConvertRequest(**{**place, **self.sample, **options}, overwrite=True, quiet=True)
        return convert_checkpoint(request, progress)


def card(device: torch.device, named: str | None) -> dict[str, Any]:
    """The date, machine, card, driver and versions, what is missing, and the commit, or what is
    ``named`` instead.
    """
    found = conditions(device)
    for name in OPTIONAL:
        with suppress(metadata.PackageNotFoundError):
            found["versions"][name] = metadata.version(name)
    found["missing"] = [name for name in OPTIONAL if name not in found["versions"]]
    # A copy of the working tree may come without its history.
    found["commit"] = named or commit()
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found["card"] = {
            "name": about.name,
            "memory_bytes": about.total_memory,
            "units": about.multi_processor_count,
        }
        found["card"]["driver"] = output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        )
        found["versions"]["cuda"] = torch.version.cuda
    return found


def attempt(about: Row, measure: Callable[[], Row]) -> Row:
    """``about`` with what ``measure`` returns, or with its traceback: a size that fails must not
    cost the others.
    """
    try:
        return {**about, **measure()}
    except Exception:
        row = {**about, "failed": traceback.format_exc()[-2000:]}
    # Out of memory, for example; what the failed call held is free only now.
    gc.collect()
    torch.cuda.empty_cache()
    return row


def seconds(call: Callable[[], Any], device: torch.device, limit: float = 0.1) -> float:
    """Median seconds of ``call``, as it is launched from Python."""
    times = sorted(repeat(Clock(device), call, limit))
    return times[len(times) // 2]


def graph_seconds(call: Callable[[], Any], device: torch.device, limit: float = 0.1) -> float:
    """Median seconds of ``call`` replayed from a CUDA graph, without the time to launch it; on a
    CPU as `seconds`.
    """
    if device.type != "cuda":
        return seconds(call, device, 0)
    stream = torch.cuda.Stream()
    calls = 5
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles and allocates, which a capture must not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return seconds(graph.replay, device, limit) / calls


@cache
def rates(device: torch.device, small: bool) -> tuple[float, float]:
    """Measured bytes per second of a copy (read and written), and operations per second of a
    bfloat16 product.
    """
    source = torch.empty(1 << (20 if small else 31), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    side = 64 if small else 8192
    left, right = torch.randn(2, side, side, device=device).bfloat16()
    copied = seconds(lambda: target.copy_(source), device, 0.5)
    return 2 * source.nbytes / copied, 2 * side**3 / seconds(lambda: left @ right, device, 0.5)


@contextmanager
def timed(
    places: Mapping[tuple[Any, str], str], device: torch.device
) -> Iterator[dict[str, float]]:
    """Add up the seconds of functions, by the names of their parts; those of timed functions that
    they call excepted.

    ``places`` maps an owner and the names of its functions, separated by spaces, to a part; all
    else is ``rest``.
    """
    found = dict[str, float]()
    opened = ["rest"]
    since = 0.0

    def turn() -> None:
        nonlocal since
        # The time of queued work belongs to the part that queued it.
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        found[opened[-1]] = found.get(opened[-1], 0.0) + now - since
        since = now

    def timing(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            turn()
            opened.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                turn()
                opened.pop()

        return call

    each = [
        (owner, name, part) for (owner, names), part in places.items() for name in names.split()
    ]
    before = [getattr(owner, name) for owner, name, _ in each]
    for (owner, name, part), function in zip(each, before, strict=True):
        setattr(owner, name, timing(part, function))
    since = time.perf_counter()
    try:
        yield found
        turn()
    finally:
        for (owner, name, _), function in zip(each, before, strict=True):
            setattr(owner, name, function)
