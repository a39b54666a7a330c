"""The memory and the disk space of what is no layer: polishing, text that the source writes, hidden states."""

import os
import shutil
from math import ceil, prod
from pathlib import Path

from kvfold.convert import processes
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.errors import InputError
from kvfold.convert.io.host import host_memory, may_have_gpu
from kvfold.convert.request import SELF, held_out_count
from kvfold.convert.sizes import bytes_text
from kvfold.convert.training.budget import batch_size, sequences_of

_AT_ONCE = 48  # sequences that are written
_MASTER = 4 + 4 + 8 + 4 + 4  # bytes per trained element: master, gradient, Adam's moments, rounded copies
_ELEMENT = 4  # bytes in float32, the widest
_ACTIVATIONS = 68  # bytes per token, layer and model dim in float32 (Korthikanti et al., 2022: 34 in 16 bit)
_LOGITS = 8 * (24 << 20)  # bytes
_STATISTICS = 2 * 8  # bytes per element of a layer's Gram matrix: two of them, in float64
_STATE = 4 + 8 + 4  # bytes per trained element on disk: master, moments, best weights

Parts = dict[str, int]  # bytes at most


def check_memory(plan: Plan) -> None:
    """Raise InputError when a request needs a whole model in memory, and it does not fit."""
    free = _free_bytes(plan) if _needs(plan) else None
    for option, (what, otherwise, parts) in _needs(plan).items():
        if free is not None and sum(parts.values()) > free:
            raise InputError(
                f"{option} {what} and needs the whole model in memory: {_text(parts)}, found {bytes_text(free)} free; "
                f"use a machine with more, or {otherwise}"
            )


def memory_lines(plan: Plan) -> list[str]:
    """Lines of ``--dry-run`` for what needs a whole model in memory, and for hidden states on disk."""
    free = _free_bytes(plan) if _needs(plan) else None
    found = "" if free is None else f"; {bytes_text(free)} free"
    lines = [f"memory for {option}: {_text(parts)}{found}" for option, (_, _, parts) in _needs(plan).items()]
    if plan.request.spill is not None:
        lines.append(f"disk for --spill: about {bytes_text(state_bytes(plan, processes.count()))} per process")
    return lines


def scratch_bytes(plan: Plan) -> int:
    """Bytes on disk beside the output while a run goes on: the statistics of MLA's survey, the state of polishing."""
    polishing = _STATE * _elements(plan)[0] if plan.request.polish and plan.request.resume else 0
    surveyed = plan.request.to == "mla" and plan.request.calibrated
    return polishing + (plan.geometry.layers * _STATISTICS * plan.geometry.model_dim**2 if surveyed else 0)


def check_spill(plan: Plan) -> None:
    """Raise InputError when the folder of ``--spill`` is none, or has no room for hidden states."""
    folder = plan.request.spill
    if folder is None:
        return
    if not os.path.isdir(folder):
        raise InputError(f"--spill {folder}: expected a folder to keep hidden states in, found none; make it first")
    needed, free = _spilled(plan), shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"--spill {folder}: too little disk space: expected {bytes_text(needed)} free for hidden states, found "
            f"{bytes_text(free)}; free some, choose a folder on another disk, or fewer --samples"
        )


def _spilled(plan: Plan) -> int:
    """Bytes that the processes on this machine spill together, and OUT's where that is on the same disk."""
    together = processes.on_this_machine() * state_bytes(plan, processes.count())
    out = next(path for path in Path(plan.request.out).absolute().parents if path.exists())
    same_disk = os.stat(out).st_dev == os.stat(str(plan.request.spill)).st_dev
    return together + (plan.disk_bytes + scratch_bytes(plan) if same_disk else 0)


def polishing_bytes(plan: Plan) -> int:
    """Bytes at most of polishing, the whole model in memory."""
    return sum(_polishing(plan).values())


def state_bytes(plan: Plan, processes: int) -> int:
    """Bytes of the hidden states of one process at the peak, in float32.

    Calibration sequences: before and after the source's layer, the student's, the targets of refinement. Held-out ones:
    once more, for the drift takes a copy on.
    """
    request = plan.request
    if not request.calibrated:
        return 0
    targets = 1 if request.refine else 0
    learned = 3 + targets if request.resolved_method == "principal" or request.refine else 0
    tokens = ceil(request.samples / processes) * request.seq_len
    held_out = held_out_count(request.samples) * request.seq_len
    weights = targets * (tokens + held_out)  # one for each token
    return 4 * (plan.geometry.model_dim * (learned * tokens + (4 + targets) * held_out) + weights)


def output_bytes(plan: Plan) -> int:
    """Bytes of what the source's layer gave for the held-out sequences: attention's input and output, heads."""
    shape, request = plan.geometry, plan.request
    heads = (2 * shape.heads + shape.kv_heads) * shape.head_dim
    return 4 * held_out_count(request.samples) * request.seq_len * (2 * shape.model_dim + heads)


def _text(parts: Parts) -> str:
    sizes = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
    return f"about {bytes_text(sum(parts.values()))} ({sizes})"


def _needs(plan: Plan) -> dict[str, tuple[str, str, Parts]]:
    """By option: what it does, what to do instead, and the memory that it takes."""
    needs = {}
    if plan.request.calibration == SELF:
        needs["--calibration self"] = ("has the source write text", "give --calibration FILE", _writing(plan))
    if plan.request.polish:
        otherwise = "leave --polish out: --refine holds one layer at a time"
        needs["--polish"] = ("trains all layers together", otherwise, _polishing(plan))
    return needs


def _polishing(plan: Plan) -> Parts:
    trained, frozen = _elements(plan)
    request, width = plan.request, plan.geometry.model_dim
    sequences = max(request.samples, sequences_of(request.polish, request.seq_len))
    return {
        "model": _ELEMENT * frozen,
        "attention with its optimizer": _MASTER * trained,
        "activations": _ACTIVATIONS * batch_size(request.seq_len) * request.seq_len * plan.geometry.layers * width
        + _LOGITS,
        "the source's states": sequences * request.seq_len * width * _ELEMENT,
    }


def _writing(plan: Plan) -> Parts:
    geometry = plan.geometry
    cached = plan.cache_elements * geometry.layers * plan.request.seq_len * _AT_ONCE
    return {
        "model": _ELEMENT * sum(prod(info.shape) for info in plan.checkpoint.tensors.values()),
        "cache": _ELEMENT * (cached + 4 * geometry.vocabulary * _AT_ONCE),
    }


def _elements(plan: Plan) -> tuple[int, int]:
    """Elements of the result that are trained, and that are not."""
    computed = {name for names in plan.layout.computed for name in names}
    sizes = {tensor.name: prod(tensor.shape) for tensor in plan.layout.tensors}
    trained = sum(size for name, size in sizes.items() if name in computed)
    return trained, sum(sizes.values()) - trained


def _free_bytes(plan: Plan) -> int | None:
    device = plan.request.device
    if device == "cpu" or (device == "auto" and not may_have_gpu()):
        return host_memory()
    from kvfold.convert.device import choose_device, free_memory  # imports torch, which takes seconds

    return free_memory(choose_device(device))
