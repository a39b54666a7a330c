"""Memory and scratch space of a conversion, from shapes alone, and the checks that both are free. No torch here."""

import os
import shutil
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

from kvfold.convert import processes
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.errors import InputError, opt
from kvfold.convert.host import host_memory, may_have_gpu
from kvfold.convert.request import SELF, held_out_count
from kvfold.convert.sizes import bytes_text
from kvfold.convert.training.budget import batch_size, sequences_of

# Libraries and allocators, by tests/convert/conversion/test_memory.py: pooling a model of width 64 peaks at 430 MB
# (torch's pages that are mapped but shared count); with transformers, a tokenizer and forward passes at 0.9 GB.
_BASE, _BASE_WITH_TEXT = 480 * 10**6, 10**9
_FLOAT, _DOUBLE = 4, 8
# E x E matrices in float64 that a fit holds, from weights alone and with statistics: Gram, its factors and inverses,
# and the moments between all heads. Peaks at a width of 1024, by the same test: 672 MB (svd), 1.43 to 1.52 GB.
_FIT_SQUARES, _FIT_SQUARES_OF_TEXT = 12, 36
_LOGITS, _LOGIT = 1 << 23, 16 * 4  # logits compared at once on a CPU; bytes each, measured with SmolLM2-135M: 12 x 4
_MASTER = 4 + 4 + 8 + 4 + 4  # bytes per trained element: master, gradient, Adam's moments, rounded copies
_SAVED = 4 + 8 + 4  # bytes per trained element on disk for --resume: master, moments, best weights
_ACTIVATIONS = 68  # bytes per token, layer and model dim in float32 (Korthikanti et al., 2022: 34 in 16 bit)
_POLISHED_LOGITS = 8 * (24 << 20)  # bytes of logits, and of their gradients, in a step of polishing
_WRITTEN_AT_ONCE = 48  # sequences of --calibration self


@dataclass(frozen=True)
class Needs:
    """Bytes that a run takes: ``memory`` and ``spilled`` (hidden states on disk) at the peak of one process.

    ``scratch`` are bytes on OUT's disk while the run goes on, besides the output.
    """

    memory: int
    spilled: int
    scratch: int


def needs_of(plan: Plan, processes: int = 1) -> Needs:
    """The needs of ``plan`` when ``processes`` share it: an upper bound, up to 2 x the measured peak for small models.

    A run without text holds one attention layer. A calibrated run holds a whole layer and its converted twin, the fit's
    matrices, and unless they are spilled the hidden states of all its tokens; polishing and ``--calibration self`` hold
    the whole model.
    """
    request, shape = plan.request, plan.geometry
    width, latent = shape.model_dim, request.to == "mla"
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * width
    fit = _DOUBLE * ((_FIT_SQUARES_OF_TEXT if request.calibrated else _FIT_SQUARES) * width**2 + 4 * attention)
    if not request.calibrated:
        read = [plan.checkpoint.tensors[name] for name in plan.read_names(0)]
        pooling = sum(info.nbytes + _FLOAT * prod(info.shape) for info in read)
        return Needs(_BASE + (fit * 11 // 10 if latent else pooling), 0, 0)

    tokens, held_out = ceil(request.samples / processes) * request.seq_len, _held_out(plan)
    # Calibration states before and after the source's layer, the student's, the targets of refinement; held-out states
    # once more, because the drift takes a copy further.
    fitted, refined = request.chosen_method.reads_text, int(bool(request.refine))
    learned = 3 + refined if fitted or refined else 0
    states = width * (learned * tokens + (4 + refined) * held_out) + refined * (tokens + held_out)
    outputs = held_out * (2 * width + (2 * shape.heads + shape.kv_heads) * shape.head_dim)  # of the source's attention
    held = 0 if request.spill else _FLOAT * (states + outputs)

    sizes = [prod(tensor.shape) for tensor in plan.model.tensors.values()]
    ends = 2 * shape.vocabulary * width  # embedding and head
    layer = (sum(sizes) - ends) // shape.layers
    in_layers = fit + _FLOAT * (max(2 * layer, ends) + 5 * attention * refined)
    at_end = 4 * _FLOAT * ends + _LOGIT * min(_LOGITS, held_out * shape.vocabulary)
    trained, polished = _polishing(plan) if request.polish else (0, 0)
    writing = 0
    if request.calibration == SELF:
        cached = plan.cache_elements * shape.layers * request.seq_len + 4 * shape.vocabulary
        writing = _FLOAT * (sum(sizes) + cached * _WRITTEN_AT_ONCE)
    surveyed = shape.layers * 2 * _DOUBLE * width**2 if latent else 0  # two Gram matrices of every layer
    return Needs(
        memory=_BASE_WITH_TEXT + max(held + max(in_layers, at_end), polished, writing),
        spilled=_FLOAT * states if request.spill else 0,
        scratch=surveyed + (_SAVED * trained if request.resume else 0),
    )


def _held_out(plan: Plan) -> int:
    """Held-out tokens."""
    return held_out_count(plan.request.samples) * plan.request.seq_len


def _polishing(plan: Plan) -> tuple[int, int]:
    """Elements that polishing trains, and the bytes that it holds."""
    request, width = plan.request, plan.geometry.model_dim
    computed = {name for names in plan.layout.computed for name in names}
    sizes = {tensor.name: prod(tensor.shape) for tensor in plan.layout.tensors}
    trained = sum(size for name, size in sizes.items() if name in computed)
    model = _FLOAT * (sum(sizes.values()) - trained) + _MASTER * trained
    activations = _ACTIVATIONS * batch_size(request.seq_len) * request.seq_len * plan.geometry.layers * width
    sequences = max(request.samples, sequences_of(request.polish, request.seq_len))
    return trained, model + activations + _POLISHED_LOGITS + _FLOAT * sequences * request.seq_len * width


def check_memory(plan: Plan) -> None:
    """Raise InputError when a request needs the whole model in memory and it does not fit."""
    whole = {
        f"{opt('calibration', SELF)}": (plan.request.calibration == SELF, f"give {opt('calibration', 'FILE')}"),
        f"{opt('polish')}": (
            bool(plan.request.polish),
            f"leave {opt('polish')} out: {opt('refine')} holds one layer at a time",
        ),
    }
    for option, (given, otherwise) in whole.items():
        if not given:
            continue
        needed, free = needs_of(plan, processes.count()).memory, free_bytes(plan)
        if free is not None and needed > free:
            raise InputError(
                f"{option} needs the whole model in memory: about {bytes_text(needed)}, found {bytes_text(free)} free; "
                f"use a machine with more, or {otherwise}"
            )


def check_spill(plan: Plan) -> None:
    """Raise InputError when the folder of ``--spill`` does not exist, or has no room for hidden states."""
    folder = plan.request.spill
    if folder is None:
        return
    if not os.path.isdir(folder):
        raise InputError(f"{opt('spill', folder)}: no such folder to keep hidden states in; make it first")
    needs = needs_of(plan, processes.count())
    needed, free = processes.count(on_this_machine=True) * needs.spilled, shutil.disk_usage(folder).free
    out = next(path for path in Path(plan.request.out).absolute().parents if path.exists())
    if os.stat(out).st_dev == os.stat(folder).st_dev:
        needed += plan.disk_bytes + needs.scratch
    if needed > free:
        raise InputError(
            f"{opt('spill', folder)}: too little disk space: hidden states need {bytes_text(needed)}, found "
            f"{bytes_text(free)} free; free some, choose a folder on another disk, or fewer {opt('samples')}"
        )


def free_bytes(plan: Plan) -> int | None:
    """Free memory where ``plan`` computes, None where the system does not say."""
    device = plan.request.device
    if device == "cpu" or (device == "auto" and not may_have_gpu()):
        return host_memory()
    from kvfold.convert.device import choose_device, free_memory  # imports torch, which takes seconds

    return free_memory(choose_device(device))
