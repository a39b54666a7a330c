"""``kvfold bench``: models timed side by side, each in its own process; the costs of a decoding
step.

A model is a checkpoint, or an attention kind of a well-known shape with random weights. Per layer,
with ``B`` sequences, ``S`` slots, ``H`` heads, ``G`` key/value heads, ``D`` head dim, latent ``R +
P``:

    cached elements    MHA, GQA, MQA  2 B S G D                MLA  B S (R + P), and divisors of
    norms as part of P operations         4 B S H D      absorbed  2 B S H (2 R + P)      expanded
    2 B S H ((Dn + Dv) R + Dn + P + Dv)
"""

import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvfold.convert.errors import InputError, KvfoldError, did_you_mean, option_error
from kvfold.convert.progress import Progress, Stages
from kvfold.convert.request import BenchRequest
from kvfold.convert.targets.mla.spec import is_latent
from kvfold.convert.targets.own_code import BLOCK, source_type

# Of published models: model dim, inner dim, heads, layers, vocabulary, positions.
SHAPES = {
    "llama-2-7b": (4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": (5120, 13824, 40, 40, 32000, 4096),
    "llama-3-8b": (4096, 14336, 32, 32, 128256, 8192),
    "llama-2-70b": (8192, 28672, 64, 80, 32000, 4096),
    "tiny": (64, 128, 8, 2, 256, 256),
}
_SETTINGS = (
    "contexts",
    "batches",
    "device",
    "dtype",
    "cache",
    "prefill_tokens",
    "seconds",
    "threads",
)
# Targets of a shape: eight key/value heads as in Llama 3, the latent of DeepSeek's models.
_KV_HEADS = 8
_RANK = 512
_ROPE = 64
_WORKER = "kvfold.convert.measure.bench_worker"
# Allocators round up and libraries need room: torch alone takes about 0.6 GB of a process.
_SPARE = 1.05
_FIXED = 600 << 20


@dataclass(frozen=True)
class Subject:
    """A model to be timed in one form.

    name: the checkpoint, or the attention kind of a shape.
    form: ``stock``, as transformers loads it, or ``absorbed``.
    config: its config, with sizes under llama's names.
    folder: where its weights are; None for random weights.
    """

    name: str
    form: str
    config: dict[str, Any]
    folder: str | None = None

    @property
    def label(self) -> str:
        """The name of its rows."""
        return f"{self.name}, {self.form}" if is_latent(self.config) else self.name


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One model at one context and batch. All but the first four fields may be None.

    model, form, context, batch: what was timed.
    prefill_tokens: the numbers of sequences and of tokens in each.
    prefill_tokens_per_s: the speed of the prefill.
    step_ms: the median time of a decoding step of all sequences.
    steps: the number of timed steps.
    decode_tokens_per_s: tokens decoded per second.
    attention_ms: the part of ``step_ms`` in attention modules.
    cache_bytes: the size of the allocated cache.
    peak_bytes: the peak memory.
    read_bytes: the bytes that a step must read: weights and cache.
    operations: the floating-point operations of a step.
    cache_bytes_formula: the cache size by formula.
    needed_bytes, free_bytes: the memory that is needed and free, if the model does not fit.
    failed: why the model does not run.
    ratio: tokens per second by those of the first model.
    """

    model: str
    form: str
    context: int
    batch: int
    prefill_tokens: list[int] | None = None
    prefill_tokens_per_s: float | None = None
    step_ms: float | None = None
    steps: int | None = None
    decode_tokens_per_s: float | None = None
    attention_ms: float | None = None
    cache_bytes: int | None = None
    peak_bytes: int | None = None
    read_bytes: int | None = None
    operations: int | None = None
    cache_bytes_formula: int | None = None
    needed_bytes: int | None = None
    free_bytes: int | None = None
    failed: str | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Benchmark:
    """The result of `bench_checkpoints`.

    kvfold, transformers, torch: versions.
    dtype: the dtype of weights and computation.
    cache: the kind of cache.
    options: the settings.
    rows: the measurements.
    device: the name of the processor.
    threads: the number of CPU threads.
    """

    kvfold: str
    transformers: str
    dtype: str
    cache: str
    options: dict[str, Any]
    rows: list[BenchRow]
    device: str
    threads: int
    torch: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; rows omit fields that are None."""
        rows = [
            {name: value for name, value in vars(row).items() if value is not None}
            for row in self.rows
        ]
        return {**vars(self), "rows": rows}


def bench_checkpoints(request: BenchRequest, progress: Progress | None = None) -> Benchmark:
    """Time ``models`` side by side, each in its own process, as ``kvfold bench`` does.

    ``shape`` adds models of a known shape with random weights, shortened to ``layers``.
    ``progress`` works as in `convert_checkpoint`, with the stage ``bench`` (models). Ratios are
    relative to the first model. If a model's process fails, its rows contain the error. Raises
    InputError for an invalid request and KvfoldError if all models fail.

    >>> sizes = {"contexts": [64], "prefill_tokens": 0, "seconds": 0.01, "quiet": True}
    >>> done = bench_checkpoints(BenchRequest([demo_folder()], **sizes))
    >>> done.rows[0].context, done.rows[0].ratio
    (64, 1.0)
    """
    from kvfold.convert.conversion.record import versions
    from kvfold.convert.device import choose_device

    subjects = list_subjects(request)
    device = choose_device(request.device).type
    # All models run in one dtype, so that their times can be compared.
    dtype = str(request.dtype)
    if dtype == "auto" and device == "cpu":
        dtype = "float32"  # few CPUs have units for bfloat16
    elif dtype == "auto":
        config = subjects[0].config
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    prefill = request.prefill_tokens
    if prefill is None:
        prefill = 2048 if device == "cpu" else 32768
    rows: list[BenchRow] = []
    machine: dict[str, Any] = {}
    failures: list[KvfoldError] = []
    stages = Stages(progress, request.quiet)
    for subject in stages.over("bench", subjects, len(subjects), "model"):
        try:
            result = run_in_process(subject, request, device, dtype, prefill)
        except KvfoldError as error:
            # One model that runs out of memory must not cost the rows of the others.
            failures.append(error)
            pairs = itertools.product(request.contexts, request.batches)
            result = {
                "rows": [
                    {"context": context, "batch": batch, "failed": str(error)}
                    for context, batch in pairs
                ]
            }
        machine |= result
        rows += [
            BenchRow(model=subject.label, form=subject.form, **row) for row in machine.pop("rows")
        ]
    if len(failures) == len(subjects):
        raise failures[0]
    versions_now = versions()
    return Benchmark(
        kvfold=str(versions_now["kvfold"]),
        transformers=str(versions_now["transformers"]),
        dtype=dtype,
        cache=request.cache,
        options={name: getattr(request, name) for name in _SETTINGS},
        rows=_add_ratios(rows),
        **machine,
    )


def _add_ratios(rows: list[BenchRow]) -> list[BenchRow]:
    """The rows with their speeds relative to the first model's at the same context and batch."""
    first = {
        (row.context, row.batch): row.decode_tokens_per_s
        for row in rows
        if row.model == rows[0].model
    }
    with_ratios = []
    for row in rows:
        speed = row.decode_tokens_per_s
        base = first[row.context, row.batch]
        with_ratios.append(replace(row, ratio=speed / base if speed and base else None))
    return with_ratios


def run_in_process(subject: Subject, *settings: Any) -> dict[str, Any]:
    """The result of `bench_worker.run` in a process of its own.

    Raises its InputError, or KvfoldError with the last line of its stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        task_file = Path(folder, "task")
        result_file = Path(folder, "result.json")
        task_file.write_bytes(pickle.dumps((subject, *settings)))
        # -P: the current folder may have a stranger's torch.py.
        command = [sys.executable, "-P", "-m", _WORKER, str(task_file), str(result_file)]
        # The worker reads the pipe until it ends: by that it knows that this process was killed.
        reader, writer = os.pipe()
        try:
            ended = subprocess.run(
                command, stdin=reader, capture_output=True, text=True, check=False
            )
        finally:
            os.close(reader)
            os.close(writer)
        if ended.returncode != 0:
            lines = [line for line in ended.stderr.splitlines() if line.strip()]
            reason = f"exit status {ended.returncode} (out of memory?)"
            raise KvfoldError(
                f"{subject.label}: its process failed: {lines[-1] if lines else reason}"
            )
        result = dict(json.loads(result_file.read_text()))
    if "refused" in result:
        message, *details = result["refused"]
        raise InputError(f"{subject.label}: {message}", details)
    return result


def list_subjects(request: BenchRequest) -> list[Subject]:
    """The request's checkpoints, then its shape with each kind of attention; MLA models both stock
    and absorbed.

    Raises InputError for a checkpoint that cannot be opened or an unknown shape.
    """
    from kvfold.convert.checkpoint.opening import open_checkpoint

    models: list[tuple[str, Mapping[str, Any], str | None]] = []
    for model in request.models:
        with closing(open_checkpoint(model)) as checkpoint:
            models.append((model, checkpoint.config, str(checkpoint.folder)))
    if request.shape is not None:
        models += [(kind, config, None) for kind, config in _shape_configs(request).items()]
    subjects = []
    for name, config, folder in models:
        sizes = dict(config) | _usual_names(config)
        subjects.append(Subject(name, "stock", sizes, folder))
        if is_latent(config):
            subjects.append(Subject(name, "absorbed", sizes, folder))
    return subjects


def _shape_configs(request: BenchRequest) -> dict[str, dict[str, Any]]:
    """Configs with MHA, GQA-8 and MLA 512 + 64 (smaller for ``tiny``) in the request's shape, by
    label.
    """
    if request.shape not in SHAPES:
        known = f"one of {', '.join(SHAPES)}{did_you_mean(request.shape, SHAPES)}"
        raise option_error("shape", request.shape, f"must be {known}")
    model_dim, inner_dim, heads, layers, vocabulary, positions = SHAPES[request.shape]
    dim = model_dim // heads
    kv_heads = min(_KV_HEADS, heads // 4)
    rank = min(_RANK, 4 * dim)
    rope = min(_ROPE, dim // 2)
    common = {
        "hidden_size": model_dim,
        "intermediate_size": inner_dim,
        "num_attention_heads": heads,
        "num_hidden_layers": request.layers or layers,
        "vocab_size": vocabulary,
        "max_position_embeddings": max(*request.contexts, positions),
        "tie_word_embeddings": False,
    }
    llama = {**common, "model_type": "llama", "head_dim": dim}
    latent = {
        **common,
        "model_type": "youtu",
        "num_key_value_heads": heads,
        "kv_lora_rank": rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": dim,
        "v_head_dim": dim,
        "attention_bias": True,
    }
    return {
        "MHA": {**llama, "num_key_value_heads": heads},
        f"GQA-{kv_heads}": {**llama, "num_key_value_heads": kv_heads},
        f"MLA {rank} + {rope}": latent,
    }


def _usual_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes in ``config`` under llama's names, for families and layouts that use different
    names.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    source = source_type(config)
    family = source or config.get("model_type")
    names = CONFIG_MAPPING[family].attribute_map if family in CONFIG_MAPPING else {}
    sizes = {usual: config[name] for usual, name in names.items() if name in config}
    if source is None:
        return sizes
    block = config[BLOCK]
    dim = block["head_dim"]
    if "kv_rank" not in block:
        return {**sizes, "head_dim": dim, "num_key_value_heads": block["kv_heads"]}
    norm = block.get("norm")
    if norm is not None:
        sizes["cached_divisors"] = 1 if norm["flat"] else block["kv_heads"]
    return {
        **sizes,
        "qk_nope_head_dim": dim,
        "v_head_dim": dim,
        "kv_lora_rank": block["kv_rank"],
        "qk_rope_head_dim": block["rope_dim"],
    }


class StepCosts(NamedTuple):
    """The costs of one decoding step of a whole model.

    cache_bytes: the cache.
    attention_operations: the operations of attention alone.
    operations: all operations.
    read_bytes: the bytes of weights and cache that must be read.
    memory: the bytes of memory that the model needs.
    """

    cache_bytes: int
    attention_operations: int
    operations: int
    read_bytes: int
    memory: int


def step_costs(
    subject: Subject,
    weights: tuple[int, int],
    size: int,
    context: int,
    batch: int,
    prefill: int = 0,
) -> StepCosts:
    """The costs of one decoding step for ``batch`` sequences of ``context`` tokens, at ``size``
    bytes per element.

    ``weights`` is the number of all parameters and of those that every step reads (layers and
    head). ``prefill`` is the number of tokens prefilled at once; the memory includes their
    activations.
    """
    config = subject.config
    total, read = weights
    layers = int(config["num_hidden_layers"])
    slots = batch * context
    heads = int(config["num_attention_heads"])
    # For one layer and slot: elements cached, operations, elements that attention makes in between.
    if config.get("kv_lora_rank") is None:
        dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        groups = int(config.get("num_key_value_heads") or heads)
        elements = 2 * groups * dim
        operations = 4 * heads * dim
        # Stock attention repeats shared keys and values for every query head.
        expanded = 0 if groups == heads else 2 * heads * dim
    else:
        rank = int(config["kv_lora_rank"])
        nope = int(config["qk_nope_head_dim"])
        value = int(config["v_head_dim"])
        rope = int(config["qk_rope_head_dim"]) + int(config.get("cached_divisors", 0))
        elements = rank + rope
        # The modeling file of layout kvfold decodes over the latents by itself.
        if subject.form == "absorbed" or source_type(config):
            operations = 2 * heads * (2 * rank + rope)
            expanded = heads
        else:
            operations = 2 * heads * ((nope + value) * rank + nope + rope + value)
            expanded = heads * (2 * nope + rope + 2 * value)
    cache = layers * slots * elements * size
    attention = layers * slots * operations
    # transformers copies a layer's growing cache at each step.
    working = (slots * elements + slots * expanded) * size
    activations = 12 * int(config["hidden_size"]) + 3 * int(config.get("intermediate_size") or 0)
    prefilling = prefill * size * (layers * elements + activations)
    memory = total * size + max(cache + working, prefilling)
    return StepCosts(
        cache_bytes=cache,
        attention_operations=attention,
        operations=attention + 2 * batch * read,
        read_bytes=cache + read * size,
        memory=int(_SPARE * memory) + _FIXED,
    )
