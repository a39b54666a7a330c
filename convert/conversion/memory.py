"""Estimate the memory and disk space that a conversion needs, and check that they are free. Does
not import torch.
"""

import shutil
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

from kvfold.convert import processes
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.errors import InputError
from kvfold.convert.formatting import format_bytes
from kvfold.convert.host import may_have_gpu, measure_host_memory
from kvfold.convert.request import SELF, SELF_TOKENS, ConvertRequest, count_held_out
from kvfold.convert.text.corpus import calibration_texts
from kvfold.convert.training.budget import BLOCK_STEPS, LOGITS, batch_size, steps_of

# Libraries and allocators, by tests/convert/conversion/test_memory.py: pooling a model of width 64
# peaks at 430 MB (torch's pages that are mapped but shared count); with transformers, a tokenizer
# and forward passes at 0.9 GB.
_BASE = 480 * 10**6
_BASE_WITH_TEXT = 10**9
_FLOAT = 4
_DOUBLE = 8
# E x E matrices in float64 that a fit holds, from weights alone and with statistics: Gram, its
# factors and inverses, and the moments between all heads. Peaks at a width of 1024, by the same
# test: 672 MB (svd), 1.43 to 1.52 GB.
_FIT_SQUARES = 12
_FIT_SQUARES_OF_TEXT = 36
# Logits compared at once and tokens per layer call, on a CPU and on a GPU: the constants of
# `attention.drift.compare` and `walk.walk`, which import torch.
_LOGITS = (1 << 23, 1 << 27)
_TOKENS = (4096, 32768)
# Bytes of each compared logit, measured with SmolLM2-135M: 12 x 4.
_LOGIT = 16 * 4
# Bytes per trained element: master, gradient, Adam's moments, rounded copies.
_MASTER = 4 + 4 + 8 + 4 + 4
# Bytes per token, layer and model dim in float32 (Korthikanti et al., 2022: 34 in 16 bit).
_ACTIVATIONS = 68
# Bytes of logits, and of their gradients, in a step of polishing: 8 tensors.
_POLISHED_LOGITS = 8 * _FLOAT * LOGITS
# Config, index, card and file system blocks.
_SLACK = 1 << 20


@dataclass(frozen=True)
class Needs:
    """The bytes that a conversion needs.

    memory: the peak of one process.
    scratch: on OUT's disk during the run.
    disk: for the output, with headers and side files.
    """

    memory: int
    scratch: int
    disk: int


def estimate_needs(plan: Plan) -> Needs:
    """Estimate the needs of each process: an upper bound, up to 2 x the measured peak for small
    models.

    A run without text keeps one attention layer in memory. A calibrated run keeps a whole layer and
    its converted twin, the activations of a layer call, the fit's matrices, and the hidden states
    of all its tokens. Polishing keeps the whole model, and so does writing calibration text
    (`writes_text`).
    """
    request = plan.request
    shape = plan.geometry
    headers = 3 * sum(len(tensor.name) + 120 for tensor in plan.output.tensors)
    extra = sum(path.stat().st_size for path in plan.checkpoint.extra_files())
    disk = sum(tensor.nbytes for tensor in plan.output.tensors) + headers + extra + _SLACK
    width = shape.model_dim
    latent = request.to == "mla"
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * width
    fit = _DOUBLE * (
        (_FIT_SQUARES_OF_TEXT if request.calibrated else _FIT_SQUARES) * width**2 + 4 * attention
    )
    if not request.calibrated:
        read = [plan.checkpoint.tensors[name] for name in plan.reads[0]]
        pooling = sum(info.nbytes + _FLOAT * prod(info.shape) for info in read)
        return Needs(_BASE + (fit * 11 // 10 if latent else pooling), 0, disk)

    length = request.length
    tokens = ceil(request.samples / processes.world_size()) * length
    held_out = count_held_out(request.samples) * length
    # States before and after the source's layer, its attention's, the student's, the targets of
    # refinement; the student's heads, and of held-out text the source's queries, keys and heads.
    refined = int(bool(request.refine))
    states = (4 + refined) * width * (tokens + held_out) + 2 * width * held_out
    heads = shape.heads * (tokens + 2 * held_out) + shape.kv_heads * held_out
    held = _FLOAT * (states + heads * shape.head_dim)
    # One layer of each model, then the embedding and the head with the logits.
    sizes = [prod(tensor.shape) for tensor in plan.model.tensors.values()]
    ends = 2 * shape.vocabulary * width
    layer = (sum(sizes) - ends) // shape.layers
    on_gpu = not _on_cpu(request)
    called = _ACTIVATIONS * min(_TOKENS[on_gpu], tokens) * width
    in_layers = fit + called + _FLOAT * (max(2 * layer, ends) + 5 * attention * refined)
    at_end = 4 * _FLOAT * ends + _LOGIT * min(_LOGITS[on_gpu], held_out * shape.vocabulary)
    whole = _whole_model(plan)
    # Trials read two Gram matrices of every layer.
    surveyed = shape.layers * 2 * _DOUBLE * width**2 if request.budget is not None else 0
    return Needs(
        memory=_BASE_WITH_TEXT + max(held + max(in_layers, at_end), whole),
        scratch=surveyed,
        disk=disk,
    )


def _whole_model(plan: Plan) -> int:
    """The bytes for polishing, or for writing calibration text, which keep the whole model."""
    request = plan.request
    shape = plan.geometry
    held = 0
    if writes_text(plan):
        cached = plan.cache_elements * shape.layers * request.length + 4 * shape.vocabulary
        model = sum(prod(tensor.shape) for tensor in plan.model.tensors.values())
        held = _FLOAT * (model + cached * max(1, SELF_TOKENS // request.length))
    if request.polish:
        computed = {name for names in plan.output.computed for name in names}
        sizes = {tensor.name: prod(tensor.shape) for tensor in plan.output.tensors}
        trained = sum(size for name, size in sizes.items() if name in computed)
        model = _FLOAT * (sum(sizes.values()) - trained) + _MASTER * trained
        activations = (
            _ACTIVATIONS
            * batch_size(request.length)
            * request.length
            * shape.layers
            * shape.model_dim
        )
        steps = min(BLOCK_STEPS, steps_of(request.polish, request.length))
        states = _FLOAT * steps * batch_size(request.length) * request.length * shape.model_dim
        held = max(held, model + activations + _POLISHED_LOGITS + states)
    return held


def writes_text(plan: Plan) -> bool:
    """True if the source writes some of the calibration text itself."""
    texts = (
        calibration_texts(plan.request.calibration, plan.checkpoint.chats)
        if plan.request.calibrated
        else []
    )
    return any(name == SELF for name, _ in texts)


def check_memory(plan: Plan) -> None:
    """Raise InputError if the request needs the whole model in memory, but it does not fit."""
    if writes_text(plan):
        option = f"text that the model writes itself (--calibration {SELF}, default of chat models)"
        otherwise = f"leave it out with --calibration {SELF}:0"
    elif plan.request.polish:
        option = "--polish"
        otherwise = "use only --refine, which loads one layer at a time"
    else:
        return
    needed = estimate_needs(plan).memory
    free = free_bytes(plan)
    if free is not None and needed > free:
        raise InputError(
            f"{option} needs the whole model in memory: about {format_bytes(needed)}, but only"
            f" {format_bytes(free)} are free; use a machine with more memory, or {otherwise}"
        )


def free_disk(plan: Plan) -> int:
    """The free bytes on OUT's disk."""
    folder = Path(plan.request.out).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def free_bytes(plan: Plan) -> int | None:
    """The free bytes of memory on the device that ``plan`` uses; None if the system does not report
    them.
    """
    if _on_cpu(plan.request):
        return measure_host_memory()
    # Only here: it imports torch, which takes seconds.
    from kvfold.convert.device import choose_device, measure_free_memory

    return measure_free_memory(choose_device(plan.request.device))


def _on_cpu(request: ConvertRequest) -> bool:
    """True if the conversion certainly computes on a CPU."""
    return request.device == "cpu" or (request.device == "auto" and not may_have_gpu())
