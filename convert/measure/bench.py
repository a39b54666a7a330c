"""``kvfold bench``: models timed side by side, with one in memory at a time.

A model is a checkpoint, or an attention kind of a well-known shape with random weights. Decoding is
timed on a cache filled with seeded random values, so it needs no prefill, which is timed
separately.
"""

import gc
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, DynamicCache, StaticCache

from kvfold.attention.deepseek import absorb
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.record import versions
from kvfold.convert.device import choose_device, measure_free_memory
from kvfold.convert.errors import option_error, suggest_name
from kvfold.convert.progress import Progress, Stages
from kvfold.convert.request import BenchRequest
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.stream.stock import AutoModelForCausalLM, empty_model, errors_as_input_errors
from kvfold.convert.targets.mla.spec import is_latent

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
_PREFILL_TOKENS = {"cpu": 2048, "cuda": 32768}
_SEED = 0
_FEWEST_CALLS = 3
_MOST_CALLS = 50
# Slots of a static cache beyond the context: each step, timed or not, fills one.
_ROOM = _MOST_CALLS + 1


@dataclass(frozen=True)
class Subject:
    """A model to be timed in one form.

    name: the checkpoint, or the attention kind of a shape.
    form: ``stock``, as transformers loads it, or ``absorbed``.
    config: its config.
    folder: where its weights are; None for random weights.
    """

    name: str
    form: str
    config: dict[str, Any]
    folder: Path | None = None

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
    cache_bytes: the size of the allocated cache.
    peak_bytes: the peak memory.
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
    cache_bytes: int | None = None
    peak_bytes: int | None = None
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
    """Time ``models`` side by side, one after the other, as ``kvfold bench`` does.

    ``shape`` adds models of a known shape with random weights, shortened to ``layers``.
    ``progress`` works as in `convert_checkpoint`, with the stage ``bench`` (models). Ratios are
    relative to the first model. A model that does not fit in memory costs only its own rows. Raises
    InputError for an invalid request or checkpoint.

    >>> sizes = {"contexts": [64], "prefill_tokens": 0, "seconds": 0.01, "quiet": True}
    >>> done = bench_checkpoints(BenchRequest([demo_folder()], **sizes))
    >>> done.rows[0].context, done.rows[0].ratio
    (64, 1.0)
    """
    subjects = list_subjects(request)
    device = choose_device(request.device)
    # All models run in one dtype, so that their times can be compared.
    dtype = str(request.dtype)
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"  # few CPUs have units for bfloat16
    elif dtype == "auto":
        config = subjects[0].config
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    rows: list[BenchRow] = []
    first: dict[tuple[int, int], float | None] = {}
    stages = Stages(progress, request.quiet)
    threads_before = torch.get_num_threads()
    threads = request.threads or threads_before
    torch.set_num_threads(threads)
    try:
        for subject in stages.over("bench", subjects, len(subjects), "model"):
            for row in _time_model(subject, request, device, getattr(torch, dtype)):
                speed = row.decode_tokens_per_s
                base = first.setdefault((row.context, row.batch), speed)
                rows.append(replace(row, ratio=speed / base if speed and base else None))
    finally:
        torch.set_num_threads(threads_before)
    installed = versions()
    return Benchmark(
        kvfold=str(installed["kvfold"]),
        transformers=str(installed["transformers"]),
        dtype=dtype,
        cache=request.cache,
        options={
            name: value
            for name, value in vars(request).items()
            if name not in ("models", "shape", "layers", "quiet")
        },
        rows=rows,
        device=read_processor_name(device),
        threads=threads,
        torch=torch.__version__,
    )


def list_subjects(request: BenchRequest) -> list[Subject]:
    """The request's checkpoints, then its shape with each kind of attention; MLA models both stock
    and absorbed.

    Raises InputError for a checkpoint that cannot be opened or built, or an unknown shape.
    """
    models: list[Subject] = []
    for model in request.models:
        with closing(open_checkpoint(model)) as checkpoint:
            models.append(Subject(model, "stock", checkpoint.config, checkpoint.folder))
    if request.shape is not None:
        for kind, config in _shape_configs(request.shape, request).items():
            models.append(Subject(kind, "stock", config))
    subjects = []
    for subject in models:
        empty_model(subject.config)  # raises the error of a wrong value before any model is timed
        subjects.append(subject)
        if is_latent(subject.config):
            subjects.append(replace(subject, form="absorbed"))
    return subjects


def _shape_configs(shape: str, request: BenchRequest) -> dict[str, dict[str, Any]]:
    """Configs with MHA, GQA-8 and MLA 512 + 64 (smaller for ``tiny``) in ``shape``, by label."""
    if shape not in SHAPES:
        known = f"one of {', '.join(SHAPES)}{suggest_name(shape, SHAPES)}"
        raise option_error("shape", shape, f"must be {known}")
    model_dim, inner_dim, heads, layers, vocabulary, positions = SHAPES[shape]
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


@torch.no_grad()
def _time_model(
    subject: Subject, request: BenchRequest, device: torch.device, dtype: torch.dtype
) -> Iterator[BenchRow]:
    """Yield a row for each context and batch, smallest first; the model is in memory meanwhile."""
    # So that the memory of the model before this one does not count.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(_SEED)
    weights = dtype.itemsize * sum(p.numel() for p in empty_model(subject.config).parameters())
    # Measured before the model is loaded: its weights are part of what a combination needs.
    free = measure_free_memory(device)
    model = None
    if free is None or weights < free:
        model = load_subject(subject, dtype, device)
    pairs = itertools.product(request.contexts, request.batches)
    for context, batch in sorted(pairs, key=lambda pair: (math.prod(pair), pair)):
        row = BenchRow(model=subject.label, form=subject.form, context=context, batch=batch)
        needed = weights
        if model is not None:
            needed += _bytes_per_slot(model) * context * batch
        if model is None or (free is not None and needed > free):
            yield replace(row, needed_bytes=needed, free_bytes=free)
            continue
        try:
            with errors_as_input_errors(subject.name):
                reset_peak_memory(device)
                figures = {
                    **_time_prefill(model, request, context, batch),
                    **_time_decoding(model, request, context, batch),
                    "peak_bytes": peak_memory(device),
                }
            yield replace(row, **figures)
        except torch.OutOfMemoryError:
            yield replace(row, failed="out of memory")


def load_subject(subject: Subject, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the subject's checkpoint, or build its config with random weights; absorb the model if
    its form says so.
    """
    if subject.folder is None:
        with torch.device(device):
            config = AutoConfig.for_model(**subject.config)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        with closing(open_checkpoint(subject.folder)) as checkpoint:
            model = load_model(checkpoint, dtype, trust_remote_code=False).to(device)
    model = model.eval().requires_grad_(False)
    if subject.form == "absorbed":
        absorb(model)
    return model


def _bytes_per_slot(model: Any) -> int:
    """The memory of each further token in the cache: its keys and values in all layers, and the
    copies that attention makes of one layer's.
    """
    cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in _cache_one_token(model))
    # Stock attention expands keys and values to all heads, and transformers copies them to append.
    copies = 4 * model.config.get_text_config().hidden_size * model.dtype.itemsize
    return int(cached + copies)


def _cache_one_token(model: Any) -> list[Any]:
    """The cache's layers after one token, which show the shapes that the model caches."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(token, past_key_values=cache, use_cache=True)
    return list(cache.layers)


def _time_prefill(model: Any, request: BenchRequest, context: int, batch: int) -> dict[str, Any]:
    """Time as much of the context as ``prefill_tokens`` allows, then as many sequences."""
    limit = request.prefill_tokens
    if limit is None:
        limit = _PREFILL_TOKENS[model.device.type]
    length = min(context, limit)
    if length == 0:
        return {}
    sequences = max(1, min(batch, limit // length))
    generator = torch.Generator().manual_seed(_SEED)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (sequences, length), generator=generator).to(model.device)
    times = time_calls(
        lambda: model(tokens, use_cache=True, logits_to_keep=1), model.device, request.seconds
    )
    return {
        "prefill_tokens": [sequences, length],
        "prefill_tokens_per_s": sequences * length / statistics.median(times),
    }


def _time_decoding(model: Any, request: BenchRequest, context: int, batch: int) -> dict[str, Any]:
    cache = _fill_cache(model, request.cache, context, batch)
    cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    if request.cache == "static":
        cache_bytes = cache_bytes * context // (context + _ROOM)
    # Which token is decoded makes no difference to the time.
    token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    times = time_calls(
        lambda: model(token, past_key_values=cache, use_cache=True), model.device, request.seconds
    )
    seconds = statistics.median(times)
    return {
        "step_ms": 1e3 * seconds,
        "steps": len(times),
        "decode_tokens_per_s": batch / seconds,
        "cache_bytes": cache_bytes,
    }


def _fill_cache(model: Any, kind: str, context: int, batch: int) -> Any:
    """A cache of ``context`` tokens with seeded standard normal values."""
    cache: Any = DynamicCache(config=model.config)
    if kind == "static":
        cache = StaticCache(model.config, max_cache_len=context + _ROOM)
    generator = torch.Generator(model.device).manual_seed(_SEED)
    for index, layer in enumerate(_cache_one_token(model)):
        keys = layer.keys.new_empty(batch, layer.keys.shape[1], context, layer.keys.shape[3])
        values = layer.values.new_empty(*keys.shape[:3], layer.values.shape[3])
        cache.update(keys.normal_(generator=generator), values.normal_(generator=generator), index)
    return cache


def time_calls(call: Callable[[], Any], device: torch.device, seconds: float) -> list[float]:
    """Run ``call`` for about ``seconds``, 3 to 50 times, and return the seconds of each call.

    One untimed call goes before them: it also compiles, allocates and fills caches.
    """
    call()
    times: list[float] = []
    while len(times) < _FEWEST_CALLS or (len(times) < _MOST_CALLS and sum(times) < seconds):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Reset ``peak_memory``; without permission, it remains the peak since the process started."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM alone


def peak_memory(device: torch.device) -> int | None:
    """Peak memory in bytes since ``reset_peak_memory``: allocated by torch on CUDA, or resident in
    the process on a CPU; None where the system does not report it.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s*(\d+)", status.read_text() if status.exists() else "")
    return int(peak[1]) << 10 if peak else None


def read_processor_name(device: torch.device) -> str:
    """The name of the GPU or CPU; "CPU" where the system does not tell it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    # platform has no name of the CPU on Linux.
    info = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*:\s*(.*\S)", info.read_text() if info.exists() else "")
    return name[1] if name else "CPU"
