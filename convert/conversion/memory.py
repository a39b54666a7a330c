"""Estimate the memory and disk space in bytes that a conversion needs, and check that there is
enough. Does not import torch.
"""

import shutil
from collections.abc import Mapping
from math import ceil, prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from kvfold.convert import processes
from kvfold.convert.checkpoint.files import list_files_besides_weights
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.errors import InputError
from kvfold.convert.formatting import format_bytes
from kvfold.convert.request import SELF, SELF_TOKENS, count_held_out
from kvfold.convert.text.corpus import choose_calibration_texts
from kvfold.convert.training.budget import (
    BLOCK_STEPS,
    choose_batch_size,
    count_polish_steps,
)

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
_LOGITS = (6 << 20, 1 << 26)
_TOKENS = (4096, 32768)
# Bytes of each compared logit, measured with SmolLM2-135M: 12 x 4.
_LOGIT = 16 * 4
# Bytes per trained element: master, gradient, Adam's moments, rounded copies.
_MASTER = 4 + 4 + 8 + 4 + 4
# Bytes per token, layer and model dim in float32 (Korthikanti et al., 2022: 34 in 16 bit).
_ACTIVATIONS = 68
# Bytes of each logit, and of its gradients, in a step of polishing: 8 tensors.
_POLISHED_LOGIT = 8 * _FLOAT
# Bytes per trained element of polishing's saved state: master, two moments and the best weights.
_STATE = 4 * _FLOAT
# Config, index, card, record and file system blocks.
_SLACK = 4 << 20


class ResourceNeeds(NamedTuple):
    """The bytes of memory and of disk space that a conversion needs.

    memory: the peak of one process.
    disk: for the output, with headers and side files, and for the state of polishing.
    by_option: the memory that an option alone needs: ``samples`` for the hidden states of all
        tokens, ``calibration`` for text that the source writes, and ``polish``; 0 if not used.
    """

    memory: int
    disk: int
    by_option: Mapping[str, int] = MappingProxyType({})


def estimate_memory_and_disk(plan: Plan) -> ResourceNeeds:
    """Estimate the bytes of memory that each process needs, and the bytes of disk space for the
    output. Both are upper bounds; small models need as little as half of the memory.

    A run without text keeps one attention layer in memory. A calibrated run keeps a whole layer and
    its converted twin, the activations of a layer call, the fit's matrices, and the hidden states
    of all its tokens. Polishing keeps the whole model, and so does writing calibration text
    (`source_writes_text`).
    """
    request = plan.request
    shape = plan.geometry
    width = shape.model_dim
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * width
    names = {name for layer in plan.output.computed_names for name in layer}
    trained = sum(prod(tensor.shape) for tensor in plan.output.tensors if tensor.name in names)
    source = plan.checkpoint.folder
    extra = sum((source / name).stat().st_size for name in list_files_besides_weights(source))
    disk = sum(shard.nbytes for shard in plan.shards) + extra + _SLACK
    if request.polish:
        disk += 2 * _STATE * trained  # a new state is whole before the old one is removed
    if not request.calibrated:
        read = [plan.checkpoint.tensors[name] for name in plan.reads[0]]
        pooling = sum(info.nbytes + _FLOAT * prod(info.shape) for info in read)
        factoring = _DOUBLE * (_FIT_SQUARES * width**2 + 4 * attention) * 11 // 10
        return ResourceNeeds(_BASE + (pooling if plan.latent is None else factoring), disk)
    length = request.calibration_length
    tokens = ceil(request.samples / processes.world_size()) * length
    held_out = count_held_out(request.samples) * length
    # States before and after the source's layer, its attention's, the student's, the targets of
    # refinement; of held-out text also the source's queries, keys and heads.
    states = 5 * width * (tokens + held_out)
    states += (2 * width + (2 * shape.heads + shape.kv_heads) * shape.head_dim) * held_out
    # One layer of each model, or the embedding and the head with the logits.
    model = sum(prod(tensor.shape) for tensor in plan.model.tensors.values())
    ends = 2 * shape.vocabulary * width
    from kvfold.convert.device import choose_device  # imports torch, which takes seconds

    on_gpu = choose_device(request.device).type == "cuda"
    layers = 2 * (model - ends) // shape.layers + 5 * attention
    in_layers = (
        _DOUBLE * (_FIT_SQUARES_OF_TEXT * width**2 + 4 * attention)
        + _ACTIVATIONS * min(_TOKENS[on_gpu], tokens) * width
        + _FLOAT * max(layers, ends)
    )
    at_end = 4 * _FLOAT * ends + _LOGIT * min(_LOGITS[on_gpu], held_out * shape.vocabulary)
    # Three of the states at least; the bound above must not refuse what would run.
    by_option = {"samples": _FLOAT * 3 * width * (tokens + held_out)}
    if source_writes_text(plan):
        cached = plan.cache_elements * shape.layers * length + 4 * shape.vocabulary
        by_option["calibration"] = _FLOAT * (model + cached * max(1, SELF_TOKENS // length))
    if request.polish:
        batch = choose_batch_size(length) * length * width
        steps = min(BLOCK_STEPS, count_polish_steps(request.polish, length))
        activations = batch * (_ACTIVATIONS * shape.layers + _FLOAT * steps)
        weights = _FLOAT * (model - trained) + _MASTER * trained
        by_option["polish"] = weights + activations + _POLISHED_LOGIT * _LOGITS[on_gpu]
    memory = max(_FLOAT * states + max(in_layers, at_end), *by_option.values())
    return ResourceNeeds(_BASE_WITH_TEXT + memory, disk, by_option)


def source_writes_text(plan: Plan) -> bool:
    """True if the source model generates some of the calibration text itself."""
    if not plan.request.calibrated:
        return False
    return SELF in dict(
        choose_calibration_texts(plan.request.calibration, plan.checkpoint.has_chat_template)
    )


def check_memory(plan: Plan) -> None:
    """Raise InputError if an option of the request needs more memory than is free: the number of
    calibration tokens, or an option that loads the whole model at once.
    """
    request = plan.request
    if not request.calibrated:
        return  # what is free is found with torch, which is imported once bytes are copied
    free_memory = get_free_memory_bytes(plan)
    if free_memory is None:
        return
    causes = {
        "samples": (
            f"--samples {request.samples} of {request.calibration_length} tokens (--seq-len) need"
            " memory for their hidden states",
            "lower --samples or --seq-len",
        ),
        "calibration": (
            "--calibration self (the default of chat models) needs the whole model in memory",
            f"lower --seq-len, or leave that text out with --calibration {SELF}:0",
        ),
        "polish": (
            "--polish needs the whole model in memory",
            "use only --refine, which loads one layer at a time",
        ),
    }
    for option, needed in estimate_memory_and_disk(plan).by_option.items():
        if _BASE_WITH_TEXT + needed > free_memory:
            option_and_need, alternative = causes[option]
            raise InputError(
                f"{option_and_need}: about {format_bytes(needed)}, but only"
                f" {format_bytes(free_memory)} are free; use a machine with more memory,"
                f" or {alternative}",
                field=option,
            )


def get_free_disk_bytes(plan: Plan) -> int:
    """Return the free bytes on the disk of the output folder."""
    folder = Path(plan.request.out).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def get_free_memory_bytes(plan: Plan) -> int | None:
    """Return the free bytes of memory on the device of the request, or None if the system does not
    report them.
    """
    from kvfold.convert.device import choose_device, measure_free_memory

    return measure_free_memory(choose_device(plan.request.device))
