"""``kvfold bench``: models timed side by side, each in its own process; the costs of a decoding
step.

A model is a checkpoint, or an attention kind of a well-known shape with random weights. Per layer,
with ``B`` sequences, ``S`` slots, ``H`` heads, ``G`` key/value heads, ``D`` head dim, latent ``R +
P``:

    cached elements    MHA, GQA, MQA  2 B S G D                MLA  B S (R + P), and divisors of
    norms as part of P operations         4 B S H D      absorbed  2 B S H (2 R + P)      expanded
    2 B S H ((Dn + Dv) R + Dn + P + Dv)
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvfold.convert.errors import InputError, KvfoldError, did_you_mean, option_error
from kvfold.convert.progress import Progress, Stages
from kvfold.convert.request import BenchRequest
from kvfold.convert.sizes import bytes_text, table
from kvfold.convert.targets.mla.spec import is_latent
from kvfold.convert.targets.own_code import BLOCK, source_type

_HEAD = (
    "model",
    "context",
    "batch",
    "prefill tok/s",
    "decode tok/s",
    "ms/step",
    "attn ms",
    "cache",
    "peak",
    "ratio",
)
# Of published models: model dim, inner dim, heads, layers, vocabulary, positions.
SHAPES = {
    "llama-2-7b": (4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": (5120, 13824, 40, 40, 32000, 4096),
    "llama-3-8b": (4096, 14336, 32, 32, 128256, 8192),
    "llama-2-70b": (8192, 28672, 64, 80, 32000, 4096),
    "tiny": (64, 128, 8, 2, 256, 256),
}
# Targets of a shape: eight key/value heads as in Llama 3, the latent of DeepSeek's models.
_KV_HEADS = 8
_RANK = 512
_ROPE = 64
# Allocators round up and libraries need room: torch alone takes about 0.6 GB of a process.
_SPARE = 1.05
_FIXED = 600 << 20


@dataclass(frozen=True)
class Subject:
    """A model in one form. ``folder`` None: random weights of ``config``. ``form``: ``stock`` or
    ``absorbed``.
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
    """One model at one context and batch: measured, or too large (``needed_bytes``,
    ``free_bytes``), or ``failed``.

    ``prefill_tokens``: numbers of sequences and of tokens in each. ``ratio``: tokens per second by
    the first model's.
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

    def cells(self) -> list[str]:
        """The row as texts for a table; fewer if nothing was measured."""
        start = [self.model, str(self.context), str(self.batch)]
        if self.failed is not None:
            return [*start, f"does not run: {self.failed.split(': ', 1)[-1]}"]
        if self.needed_bytes is not None:
            needed = bytes_text(self.needed_bytes)
            free = bytes_text(self.free_bytes or 0)
            return [*start, f"does not fit: needs {needed}, but only {free} is free"]
        return [
            *start,
            "-" if self.prefill_tokens_per_s is None else f"{self.prefill_tokens_per_s:.0f}",
            f"{self.decode_tokens_per_s:.1f}",
            f"{self.step_ms:.1f}",
            f"{self.attention_ms:.1f}",
            bytes_text(self.cache_bytes or 0),
            bytes_text(self.peak_bytes or 0),
            "-" if self.ratio is None else f"{self.ratio:.2f}",
        ]


@dataclass(frozen=True)
class Benchmark:
    """The results of ``kvfold bench``: settings, machine (``device`` is the processor's name), and
    rows.
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

    def table(self) -> str:
        """A line for each model, context and batch; one that was not measured gives the reason."""
        many = len({(row.context, row.batch) for row in self.rows}) > 1
        rows = sorted(self.rows, key=lambda row: (row.context, row.batch)) if many else self.rows
        head = f"{self.device}, {self.threads} threads, {self.dtype}, {self.cache} cache"
        versions = f"kvfold {self.kvfold}, torch {self.torch}, transformers {self.transformers}"
        return "\n".join(
            [
                f"{head}; {versions}",
                "",
                *table([_HEAD, *(row.cells() for row in rows)]),
                *self._notes(),
            ]
        )

    def _notes(self) -> list[str]:
        """What ``absorbed`` means, and how much faster it decodes, if there are such rows."""
        absorbed = [row for row in self.rows if row.form == "absorbed"]
        if not absorbed:
            return []
        speeds = {(row.model, row.context, row.batch): row.decode_tokens_per_s for row in self.rows}
        gains = []
        for row in absorbed:
            stock = speeds.get((row.model.replace(", absorbed", ", stock"), row.context, row.batch))
            if stock and row.decode_tokens_per_s:
                gains.append(row.decode_tokens_per_s / stock)
        gain = (
            f", which decodes {min(gains):.1f} to {max(gains):.1f} times as fast here"
            if gains
            else ""
        )
        return [
            "",
            (
                "stock: as transformers loads it; absorbed: after"
                f" kvfold.attention.absorb(model){gain}"
            ),
        ]


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

    chosen = subjects(request)
    device = choose_device(request.device).type
    # All models run in one dtype, so that their times can be compared: few CPUs have units for
    # bfloat16.
    dtype = str(request.dtype)
    config = chosen[0].config
    prefill = request.prefill_tokens
    if dtype == "auto":
        dtype = (
            "float32"
            if device == "cpu"
            else str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        )
    if prefill is None:
        prefill = 2048 if device == "cpu" else 32768
    rows: list[BenchRow] = []
    machine: dict[str, Any] = {}
    failures: list[KvfoldError] = []
    for subject in Stages(progress, request.quiet).over("bench", chosen, len(chosen), "model"):
        try:
            result = run_in_process(subject, request, device, dtype, prefill)
        except KvfoldError as error:
            # One model that runs out of memory must not cost the rows of the others.
            failures.append(error)
            pairs = [
                {"context": context, "batch": batch}
                for context in request.contexts
                for batch in request.batches
            ]
            result = {"rows": [{**pair, "failed": str(error)} for pair in pairs]}
        rows += [
            BenchRow(model=subject.label, form=subject.form, **row) for row in result.pop("rows")
        ]
        machine |= result
    if len(failures) == len(chosen):
        raise failures[0]
    first = {
        (row.context, row.batch): row.decode_tokens_per_s
        for row in rows
        if row.model == chosen[0].label
    }
    for place, row in enumerate(rows):
        speed = row.decode_tokens_per_s
        base = first[row.context, row.batch]
        rows[place] = replace(row, ratio=speed / base if speed and base else None)
    names = (
        "contexts",
        "batches",
        "device",
        "dtype",
        "cache",
        "prefill_tokens",
        "seconds",
        "threads",
    )
    options = {name: getattr(request, name) for name in names}
    found = versions()
    about = str(found["kvfold"]), str(found["transformers"]), dtype, request.cache
    return Benchmark(*about, options, rows, **machine)


def run_in_process(subject: Subject, *settings: Any) -> dict[str, Any]:
    """`bench_worker.run` in a process of its own: its InputError, or KvfoldError with the last line
    of its stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        task_file = Path(folder, "task")
        result_file = Path(folder, "result.json")
        task_file.write_bytes(pickle.dumps((subject, *settings)))
        command = [
            sys.executable,
            "-P",  # the current folder may have a stranger's torch.py
            "-m",
            "kvfold.convert.measure.bench_worker",
            str(task_file),
            str(result_file),
        ]
        # The worker reads the pipe until it ends: by that it knows that this process was killed.
        alive, ours = os.pipe()
        try:
            done = subprocess.run(command, stdin=alive, capture_output=True, text=True, check=False)
        finally:
            os.close(alive)
            os.close(ours)
        if done.returncode != 0:
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            why = last[0] if last else f"exit status {done.returncode} (out of memory?)"
            raise KvfoldError(f"{subject.label}: its process failed: {why}")
        result = dict(json.loads(result_file.read_text()))
    if "refused" in result:
        first, *others = result["refused"]
        raise InputError(f"{subject.label}: {first}", others)
    return result


def subjects(request: BenchRequest) -> list[Subject]:
    """The request's checkpoints, then its shape with each kind of attention; MLA models both stock
    and absorbed.

    Raises InputError for a checkpoint that cannot be opened or an unknown shape.
    """
    from kvfold.convert.checkpoint.opening import open_checkpoint

    found: list[tuple[str, Mapping[str, Any], str | None]] = []
    for model in request.models:
        checkpoint = open_checkpoint(model)
        found.append((model, checkpoint.config, str(checkpoint.folder)))
        checkpoint.close()
    if request.shape is not None:
        found += [(kind, config, None) for kind, config in _shape_configs(request).items()]
    return [
        Subject(name, form, {**config, **_usual_names(config)}, folder)
        for name, config, folder in found
        for form in (("stock", "absorbed") if is_latent(config) else ("stock",))
    ]


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
    kind = config.get("model_type")
    names = (
        CONFIG_MAPPING[source or kind].attribute_map if (source or kind) in CONFIG_MAPPING else {}
    )
    sizes = {usual: config[name] for usual, name in names.items() if name in config}
    if source is None:
        return sizes
    block = config[BLOCK]
    dim = block["head_dim"]
    if "kv_rank" not in block:
        return {**sizes, "head_dim": dim, "num_key_value_heads": block["kv_heads"]}
    sizes |= {"qk_nope_head_dim": dim, "v_head_dim": dim}
    sizes |= {"kv_lora_rank": block["kv_rank"], "qk_rope_head_dim": block["rope_dim"]}
    if (norm := block.get("norm")) is not None:
        sizes["cached_divisors"] = 1 if norm["flat"] else block["kv_heads"]
    return sizes


# Bytes and operations of one decoding step of a whole model, and the memory that it needs, in
# bytes.
StepCosts = namedtuple("StepCosts", "cache_bytes attention_operations operations read_bytes memory")


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
    config, (total, read) = subject.config, weights
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
        rank, nope, value = (
            int(config[name]) for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        )
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
