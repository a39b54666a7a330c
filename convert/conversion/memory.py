"""Estimate the memory of the host and of the GPU and the disk space, in bytes, that a run needs,
and check that there is enough. Does not import torch.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from kvfold.convert.checkpoint.files import list_files_besides_weights
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.errors import InputError
from kvfold.convert.formatting import format_bytes
from kvfold.convert.request import LONG_LENGTH, SELF, SELF_TOKENS, count_held_out
from kvfold.convert.text.corpus import choose_calibration_texts
from kvfold.convert.training.budget import (
    BLOCK_STEPS,
    MOST_ACTIVATIONS,
    choose_refine_batch_size,
    count_activation_bytes,
    count_polish_steps,
    count_step_tokens,
)

# Constants of the host are from one fit and refinement of two layers of width 4096;
# recipes/benchmarks/bench_memory.py measures them. Bytes of libraries: torch alone; with
# transformers, a tokenizer and a first pass. With CUDA, and of a GPU its context and workspaces:
# not measured.
_BASE = 480 * 10**6
_BASE_WITH_TEXT = 620 * 10**6
_BASE_WITH_CUDA = 3 * 10**9
_BASE_ON_GPU = 10**9
_FLOAT = 4
_DOUBLE = 8
# E x E matrices in float64: of a fit with what refits the output projection; of sums while the text
# runs, of which refinement still has some.
_FIT_SQUARES = 14
_SUM_SQUARES = 8
# Logits compared at once and tokens per layer call, on a CPU and on a GPU: the constants of
# `attention.drift.compare` and `walk.walk`, which import torch.
_LOGITS = (6 << 20, 1 << 26)
_TOKENS = (4096, 8192)
# Tensors of logits, in float32: in a comparison, measured with SmolLM2-135M; in a training step,
# of both models with their gradients.
_COMPARED = 12
_TRAINED = 8
# Bytes per trained element: master, Adam's moments, and gradient.
_MASTER = 4 + 8
_GRADIENT = 4
# Config, index, card, record and file system blocks.
_SLACK = 4 << 20

_DEVICES = {"host": "about {} of RAM", "gpu": "an estimated {} of GPU memory"}


class MemoryNeed(NamedTuple):
    """The bytes of memory that a stage of a run needs, and the words of the error if they are not
    free.

    host, gpu: on the host and on the GPU.
    field: the option that decides how many; the error is about it.
    cause: what needs them, such as ``--polish needs the whole model in memory:``.
    advice: how to need less.
    """

    host: int
    gpu: int
    field: str
    cause: str
    advice: str


class CalibratedRun:
    """What the stages of a calibrated run of ``plan`` need, on a CPU or with a GPU, without the
    memory of the libraries. Sizes are numbers of elements.

    layer: the weights of a layer.
    attention: of the attention in a layer of the source.
    converted: of the attention in a layer of the result.
    head: of the output head.
    length: the tokens of a sequence.
    tokens: of the calibration text.
    held_out: of the held-out text.
    step: of a step of polishing.
    """

    def __init__(self, plan: Plan, on_gpu: bool) -> None:
        shape = plan.geometry
        self.plan = plan
        self.on_gpu = on_gpu
        self.width = shape.model_dim
        self.layers = shape.layers
        tensors = plan.model.tensors.items()
        numbered = [tensor for name, tensor in tensors if re.search(r"\b\d+\.", name)]
        self.layer = sum(prod(tensor.shape) for tensor in numbered) // self.layers
        self.attention = _count_attention(plan)
        self.converted = count_trained(plan) // self.layers
        self.head = shape.vocabulary * self.width
        self.length = plan.request.calibration_length
        self.tokens = plan.request.samples * self.length
        self.held_out = count_held_out(plan.request.samples) * self.length
        self.step = count_step_tokens(self.length)

    def list_needs(self) -> list[MemoryNeed]:
        """Return what each stage needs, in their order."""
        request = self.plan.request
        needs = [self.estimate_fit()]
        if request.refine:
            needs.append(self.estimate_refinement())
        needs.append(self.estimate_comparison())
        has_template = self.plan.checkpoint.has_chat_template
        if SELF in dict(choose_calibration_texts(request.calibration, has_template)):
            needs.append(self.estimate_text())
        if request.polish:
            needs.append(self.estimate_polishing())
        return needs

    def count_states(self) -> int:
        """Return the bytes of the hidden states of all text: before and after the source's layer,
        after its attention, and the student's; of held-out text also its attention's inputs.
        """
        return _FLOAT * self.width * (4 * self.tokens + 5 * self.held_out)

    def count_open_layers(self) -> int:
        """Return the bytes of a layer of both models and, of trials of splits, two statistics of
        each of four layers.
        """
        statistics = 8 * _DOUBLE * self.width**2 * (self.plan.request.budget is not None)
        return _FLOAT * (self.layer + self.converted) + statistics

    def estimate_fit(self) -> MemoryNeed:
        """Return what the conversion of a layer needs: the layer of both models, and passes of the
        text or, after them, the fit.
        """
        square = _DOUBLE * self.width**2
        chunk = min(_TOKENS[self.on_gpu], max(self.tokens, self.held_out))
        # Of many experts each token passes a few: no more than the widest MLPs.
        inner = min((self.layer - self.attention) // self.width, 16 * self.width)
        running = _FLOAT * chunk * (inner + 12 * self.width)
        fitting = 0
        if self.plan.method.reads_text:
            running += _SUM_SQUARES * square
            fitting = _FIT_SQUARES * square + 2 * _DOUBLE * self.attention
        return MemoryNeed(
            # The fit is on the host of a GPU that is slow in float64.
            self.count_states() + fitting * self.on_gpu,
            self.count_open_layers() + max(running, fitting),
            "samples",
            f"fitting to --samples {self.plan.request.samples} of {self.length} tokens needs",
            "lower --samples or --seq-len",
        )

    def estimate_refinement(self) -> MemoryNeed:
        """Return what the training of a layer needs: the layer of both models, what they learn, and
        the trained weights with their gradients, moments and rounded copies.
        """
        squares = _SUM_SQUARES * _DOUBLE * self.width**2 * self.plan.method.reads_text
        batch = choose_refine_batch_size(self.length) * self.length
        # On a GPU the inputs too, which on the host are the states.
        examples = _FLOAT * self.width * self.tokens * (1 + self.on_gpu)
        training = 2 * (_MASTER + _GRADIENT) * self.converted
        training += 2 * count_activation_bytes(1, self.attention, self.width, batch)
        return MemoryNeed(
            self.count_states() + squares,
            self.count_open_layers() + examples + training,
            "refine",
            f"--refine on --samples {self.plan.request.samples} of {self.length} tokens needs",
            "lower --samples or --seq-len, or convert without --refine",
        )

    def estimate_comparison(self) -> MemoryNeed:
        """Return what comparing the result with the source needs."""
        shape = self.plan.geometry
        tokens = max(self.held_out, min(LONG_LENGTH, shape.positions))
        need = _estimate_comparison(self.layer, self.width, shape.vocabulary, tokens, self.on_gpu)
        return need._replace(
            field="device",
            cause=f"a vocabulary of {shape.vocabulary} needs",
            advice="convert without text (--method mean or svd)",
        )

    def estimate_text(self) -> MemoryNeed:
        """Return what the source needs to write calibration text: its weights and a cache."""
        # On a GPU in 16 bits, as it is stored, unless the request says otherwise.
        half = self.on_gpu and self.plan.request.precision != "float32"
        elements = sum(prod(tensor.shape) for tensor in self.plan.model.tensors.values())
        weights = elements * (2 if half else _FLOAT)
        cached = self.plan.cache_elements * self.layers * self.length
        cached += 4 * self.plan.geometry.vocabulary
        return MemoryNeed(
            weights * self.on_gpu,
            weights + _FLOAT * cached * max(1, SELF_TOKENS // self.length),
            "calibration",
            "--calibration self (the default of chat models) needs the whole model in memory:",
            f"lower --seq-len, or leave that text out with --calibration {SELF}:0",
        )

    def count_polish_activations(self) -> int:
        """Return the bytes of activations of all layers in a step of polishing."""
        return count_activation_bytes(self.layers, self.layer, self.width, self.step)

    def estimate_polishing(self) -> MemoryNeed:
        """Return what polishing needs: all frozen weights, the trained ones with moments, what a
        step keeps of each layer, and then logits or, without them, gradients.
        """
        request = self.plan.request
        trained = self.converted * self.layers
        frozen = (self.layer - self.attention) * self.layers
        steps = min(BLOCK_STEPS, count_polish_steps(request.polish, self.length))
        activations = self.count_polish_activations()
        gradients = _GRADIENT * trained
        if activations > MOST_ACTIVATIONS:
            stored = sum(info.nbytes for info in self.plan.checkpoint.tensors.values())
            weights = stored * frozen // self.plan.checkpoint.count_elements()
            # A layer that runs, and its weights in float32.
            gradients += activations // self.layers + _FLOAT * self.layer
            activations = _FLOAT * self.layers * self.step * self.width
        else:
            weights = _FLOAT * (frozen + trained)
        vocabulary = self.plan.geometry.vocabulary
        logits = _FLOAT * _TRAINED * min(_LOGITS[self.on_gpu], self.step * vocabulary)
        return MemoryNeed(
            # The source's states, and the best trained weights with those that replace them.
            _FLOAT * self.width * (steps * self.step + self.held_out) + 4 * trained + 2 * self.head,
            _MASTER * trained + weights + _FLOAT * self.head + activations + max(logits, gradients),
            "polish",
            "--polish needs the whole model in memory:",
            "use only --refine, which loads one layer at a time",
        )


def _count_attention(plan: Plan) -> int:
    """Return the number of elements of the attention in a layer of the source."""
    shape = plan.geometry
    return 2 * (shape.heads + shape.kv_heads) * shape.head_dim * shape.model_dim


def count_trained(plan: Plan) -> int:
    """Return the number of elements that the conversion computes, which polishing trains."""
    names = {name for layer in plan.output.computed_names for name in layer}
    return sum(prod(tensor.shape) for tensor in plan.output.tensors if tensor.name in names)


def needs_checkpointing(plan: Plan) -> bool:
    """Return whether polishing keeps frozen weights in their stored dtypes, and runs layers again
    for their gradients: if activations of all layers are large.
    """
    return CalibratedRun(plan, on_gpu=False).count_polish_activations() > MOST_ACTIVATIONS


def estimate_memory_by_stage(plan: Plan, on_gpu: bool) -> list[MemoryNeed]:
    """Return what each stage of the run of ``plan`` needs, on a CPU or with a GPU."""
    if plan.request.calibrated:
        return [_add_libraries(need, on_gpu) for need in CalibratedRun(plan, on_gpu).list_needs()]
    # One attention layer at a time, on the host.
    read = [plan.checkpoint.tensors[name] for name in plan.reads[0]]
    layer = sum(info.nbytes + _FLOAT * prod(info.shape) for info in read)
    if plan.mla_spec is not None:  # an SVD, and copies of the weights
        layer = _DOUBLE * (_FIT_SQUARES * plan.geometry.model_dim**2 + 4 * _count_attention(plan))
    advice = "use a machine with more memory"
    return [MemoryNeed(_BASE + layer, 0, "model", "one layer needs", advice)]


def _add_libraries(need: MemoryNeed, on_gpu: bool) -> MemoryNeed:
    """Return ``need`` plus the memory of the libraries; without a GPU, all of it is the host's."""
    if on_gpu:
        return need._replace(host=need.host + _BASE_WITH_CUDA, gpu=need.gpu + _BASE_ON_GPU)
    return need._replace(host=need.host + need.gpu + _BASE_WITH_TEXT, gpu=0)


def estimate_memory(plan: Plan, on_gpu: bool) -> tuple[int, int]:
    """Return the bytes of memory that the run of ``plan`` needs on the host and on the GPU, which
    is 0 without one. The GPU's follow from the tensors that lie there, and were not measured.
    """
    needs = estimate_memory_by_stage(plan, on_gpu)
    return max(need.host for need in needs), max(need.gpu for need in needs)


def estimate_disk(plan: Plan) -> int:
    """Return the bytes of disk space for the output, with headers and side files, and for the state
    of polishing.
    """
    source = plan.checkpoint.folder
    extra = sum((source / name).stat().st_size for name in list_files_besides_weights(source))
    disk = sum(shard.nbytes for shard in plan.shards) + extra + _SLACK
    if plan.request.polish:
        # Master, two moments and the best weights; a new state is whole before the old one leaves.
        disk += 2 * 4 * _FLOAT * count_trained(plan)
    return disk


def uses_gpu(plan: Plan) -> bool:
    """Return whether the run of ``plan`` computes on a GPU."""
    if not plan.request.calibrated:
        return False
    from kvfold.convert.device import choose_device  # imports torch, which takes seconds

    return choose_device(plan.request.device).type == "cuda"


def check_memory(plan: Plan) -> None:
    """Raise InputError if a stage of the run needs more memory than is free on the host or on the
    GPU; the message has both numbers and what needs less.
    """
    if plan.request.calibrated:  # what is free is found with torch, imported once bytes are copied
        on_gpu = uses_gpu(plan)
        check_free_memory(estimate_memory_by_stage(plan, on_gpu), on_gpu)


def check_free_memory(needs: Sequence[MemoryNeed], on_gpu: bool) -> None:
    """Raise InputError for the first of ``needs`` that exceeds what is free on the host or, if a
    run is ``on_gpu``, on the GPU.
    """
    free = {name: get_free_memory_bytes(name) for name in ("host", "gpu")[: 1 + on_gpu]}
    # Without a GPU, all of it is the host's.
    on_cpu = max(need.host + need.gpu for need in needs)
    for need in needs:
        for name, available in free.items():
            needed: int = getattr(need, name)
            if available is None or needed <= available:
                continue
            advice = need.advice
            if name == "gpu" and on_cpu <= (free["host"] or 0):
                advice = f"use --device cpu, which needs at most {format_bytes(on_cpu)} of RAM"
            raise InputError(
                f"{need.cause} {_DEVICES[name].format(format_bytes(needed))}, but only"
                f" {format_bytes(available)} are free; {advice}, or use a"
                f" {'machine' if name == 'host' else 'GPU'} with more memory",
                field=need.field,
            )


def estimate_comparison_memory(elements: int, config: Any, tokens: int, on_gpu: bool) -> MemoryNeed:
    """Return what `kvfold drift` needs for ``tokens`` tokens and models of ``elements`` weights
    with transformers' ``config``.
    """
    width = config.hidden_size
    layer = (elements - config.vocab_size * width) // config.num_hidden_layers
    need = _estimate_comparison(layer, width, config.vocab_size, tokens, on_gpu)
    return _add_libraries(need, on_gpu)


def _estimate_comparison(
    layer: int, width: int, vocabulary: int, tokens: int, on_gpu: bool
) -> MemoryNeed:
    """Return what a comparison of two models with layers of ``layer`` weights needs: the states of
    both for ``tokens`` tokens, and a layer of both or their heads with logits.
    """
    head = vocabulary * width
    running = 2 * layer + min(_TOKENS[on_gpu], tokens) * min(layer // width, 32 * width)
    ends = 2 * head + _COMPARED * min(_LOGITS[on_gpu], tokens * vocabulary)
    return MemoryNeed(
        2 * head,
        _FLOAT * (2 * tokens * width + max(running, ends)),
        "samples",
        "comparing the models needs",
        "lower --samples or --seq-len",
    )


def estimate_uptraining_memory(
    elements: int, frozen: int, config: Any, tokens: int, on_gpu: bool, checkpointing: bool
) -> MemoryNeed:
    """Return what `kvfold uptrain` needs for ``tokens`` tokens at a time and a model of
    ``elements`` weights with transformers' ``config``, beside ``frozen`` bytes of other weights.
    """
    width = config.hidden_size
    layers = config.num_hidden_layers
    layer = (elements - config.vocab_size * width) // layers
    activations = count_activation_bytes(layers, layer, width, tokens)
    if checkpointing:
        activations = activations // layers + _FLOAT * layers * tokens * width
    logits = _FLOAT * _TRAINED * min(_LOGITS[on_gpu], tokens * config.vocab_size)
    need = MemoryNeed(
        # At the end the best weights so far, in place of gradients if there is no GPU.
        _FLOAT * elements * on_gpu,
        (_MASTER + _GRADIENT) * elements + frozen + activations + logits,
        "model",
        "uptraining all weights needs",
        "use --gradient-checkpointing, a smaller --micro-batch, or convert with --polish or"
        " --refine, which train the attention alone",
    )
    return _add_libraries(need, on_gpu)


def describe_memory(plan: Plan) -> Mapping[str, Any]:
    """Return the bytes needed and free on the host and on the GPU, by name; None for a GPU that
    is not used, and where the system reports nothing.
    """
    on_gpu = uses_gpu(plan)
    host, gpu = estimate_memory(plan, on_gpu)
    return {
        "host_memory_bytes": host,
        "host_memory_free_bytes": get_free_memory_bytes("host"),
        "card_memory_bytes": gpu if on_gpu else None,
        "card_memory_free_bytes": get_free_memory_bytes("gpu") if on_gpu else None,
    }


def get_free_disk_bytes(plan: Plan) -> int:
    """Return the free bytes on the disk of the output folder."""
    folder = Path(plan.request.out).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def get_free_memory_bytes(name: str) -> int | None:
    """Return the free bytes of memory of the ``"host"`` or the ``"gpu"``, or None if the system
    does not report them.
    """
    from kvfold.convert.device import choose_device, measure_free_memory

    return measure_free_memory(choose_device("cuda" if name == "gpu" else "cpu"))
