"""``kvfold bench``: models timed side by side, with one in memory at a time.

A model is a checkpoint, or an attention kind of a well-known shape with random weights. Decoding is
timed on a cache filled with seeded random values, so it needs no prefill, which is timed
separately.
"""

import gc
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import timer
from transformers import AutoConfig, DynamicCache

from kvfold.attention.deepseek import absorb
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.record import get_package_versions
from kvfold.convert.device import choose_device, measure_free_memory, search_proc
from kvfold.convert.errors import option_error
from kvfold.convert.formatting import format_bytes
from kvfold.convert.progress import Progress, ProgressStages
from kvfold.convert.request import BenchRequest
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.stream.stock import (
    AutoModelForCausalLM,
    build_empty_model,
    errors_as_input_errors,
)
from kvfold.convert.targets.mla.spec import is_mla_config

# Values of config.json of published models; "tiny" is for tests.
_SHAPES = json.loads(Path(__file__).with_name("bench_shapes.json").read_text())

_FEWEST_CALLS = 3
_MOST_CALLS = 50


@dataclass(frozen=True)
class BenchmarkedModel:
    """A model to be timed, as transformers loads it (stock) or with MLA's projections absorbed.

    name: the checkpoint, or the attention kind of a shape, and for MLA the form.
    form: ``stock``, as transformers loads it, or ``absorbed``.
    config: its config.
    folder: where its weights are; None for random weights.
    """

    name: str
    form: str
    config: dict[str, Any]
    folder: Path | None = None


@dataclass(frozen=True)
class Benchmark:
    """The result of `bench_checkpoints`: what was timed, on which hardware, and a row of figures
    for each combination.

    versions: of the installed packages.
    dtype: the dtype of weights and computation.
    device: the name of the processor.
    threads: the number of CPU threads.
    options: the request.
    rows: JSON objects, one for each ``model`` (in its ``form``), ``context`` and ``batch``:
        ``prefill_tokens_per_s``; the median ``step_ms`` of a decoding step of all sequences, over
        ``steps``; ``decode_tokens_per_s``; ``cache_bytes``; ``peak_bytes`` of memory; and
        ``ratio``, the tokens per second by those of the first model. Instead of these, ``failed``
        says why a model does not run.
    """

    versions: dict[str, str | None]
    dtype: str
    device: str
    threads: int
    options: dict[str, Any]
    rows: list[dict[str, Any]]


def bench_checkpoints(request: BenchRequest, progress: Progress | None = None) -> Benchmark:
    """Time the models of ``request`` one after the other, and compare their speeds.

    ``shape`` adds models of a known shape with random weights, shortened to ``layers``.
    ``progress`` works as in `convert_checkpoint`, with the stage ``bench`` (models). Ratios are
    relative to the first model. A model that does not fit in memory costs only its own rows. Raises
    InputError for an invalid request or checkpoint.

    >>> sizes = {"contexts": [64], "prefill_tokens": 0, "seconds": 0.01, "quiet": True}
    >>> done = bench_checkpoints(BenchRequest([demo_folder()], **sizes))
    >>> done.rows[0]["context"], done.rows[0]["ratio"]
    (64, 1.0)
    """
    subjects = list_models_to_benchmark(request)
    device = choose_device(request.device)
    # All models run in one dtype, so that their times can be compared.
    dtype = str(request.dtype)
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"  # few CPUs have units for bfloat16
    elif dtype == "auto":
        config = subjects[0].config
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    rows: list[dict[str, Any]] = []
    first: dict[tuple[int, int], float] = {}
    stages = ProgressStages(progress, request.quiet)
    for subject in stages.iterate_over("bench", subjects, len(subjects), "model"):
        for row in _time_model(subject, request, device, getattr(torch, dtype)):
            if speed := row.get("decode_tokens_per_s"):
                row["ratio"] = speed / first.setdefault((row["context"], row["batch"]), speed)
            rows.append(row)
    return Benchmark(
        versions=get_package_versions(),
        dtype=dtype,
        device=read_processor_name(device),
        threads=torch.get_num_threads(),
        options=asdict(request),
        rows=rows,
    )


def list_models_to_benchmark(request: BenchRequest) -> list[BenchmarkedModel]:
    """The models that the request times: its checkpoints, then its shape with each kind of
    attention; MLA models both stock and absorbed.

    Raises InputError for a checkpoint that cannot be opened or built, or an unknown shape.
    """
    models: list[BenchmarkedModel] = []
    for name in request.models:
        checkpoint = open_checkpoint(name)
        models.append(BenchmarkedModel(name, "stock", checkpoint.config, checkpoint.folder))
    if request.shape is not None:
        for kind, config in _make_shape_configs(request.shape, request).items():
            models.append(BenchmarkedModel(kind, "stock", config))
    subjects = []
    for model in models:
        # Raises the error of a wrong value before any model is timed.
        build_empty_model(model.config)
        if is_mla_config(model.config):
            forms = ("stock", "absorbed")
            subjects += [replace(model, name=f"{model.name}, {form}", form=form) for form in forms]
        else:
            subjects.append(model)
    return subjects


def _make_shape_configs(shape: str, request: BenchRequest) -> dict[str, dict[str, Any]]:
    """The configs of a model of size ``shape`` with MHA, GQA-8 and MLA 512 + 64 (smaller for
    ``tiny``), keyed by the name of the attention kind.
    """
    if shape not in _SHAPES:
        raise option_error("shape", shape, f"must be one of {', '.join(_SHAPES)}")
    sizes = _SHAPES[shape]
    common = {
        **sizes,
        "max_position_embeddings": max(*request.contexts, sizes["max_position_embeddings"]),
        "num_hidden_layers": request.layers or sizes["num_hidden_layers"],
        "tie_word_embeddings": False,
    }
    heads = sizes["num_attention_heads"]
    dim = sizes["hidden_size"] // heads
    # Eight key/value heads as in Llama 3, and the latent of DeepSeek's models.
    kv_heads = min(8, heads // 4)
    rank = min(512, 4 * dim)
    rope = min(64, dim // 2)
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
    subject: BenchmarkedModel, request: BenchRequest, device: torch.device, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Yield a row of figures for each context length and batch size, smallest first, with the model
    in memory.
    """
    # So that the memory of the model before this one does not count.
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    weights = dtype.itemsize * sum(
        p.numel() for p in build_empty_model(subject.config).parameters()
    )
    # Measured before the model is loaded: its weights are part of what a combination needs.
    free = measure_free_memory(device) or math.inf
    model = None
    token_bytes = 0
    if weights < free:
        model = load_benchmarked_model(subject, dtype, device)
        token_bytes = _count_cache_bytes(_make_one_token_cache(model))
    pairs = itertools.product(request.contexts, request.batches)
    for context, batch in sorted(pairs, key=lambda pair: (math.prod(pair), pair)):
        row = {"model": subject.name, "form": subject.form, "context": context, "batch": batch}
        needed = weights + token_bytes * context * batch
        if model is None or needed > free:
            needs = f"needs {format_bytes(needed)}, {format_bytes(int(free))} is free"
            yield row | {"failed": needs}
            continue
        try:
            with errors_as_input_errors(subject.name):
                yield row | _time_context_and_batch(model, request, context, batch)
        except torch.OutOfMemoryError:
            yield row | {"failed": "out of memory"}


def load_benchmarked_model(
    subject: BenchmarkedModel, dtype: torch.dtype, device: torch.device
) -> Any:
    """The model in memory: its checkpoint, or its config with random weights; with MLA's
    projections absorbed if ``form`` is ``absorbed``.
    """
    if subject.folder is None:
        with torch.device(device):
            config = AutoConfig.for_model(**subject.config)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        checkpoint = open_checkpoint(subject.folder)
        model = load_model(checkpoint, dtype, trust_remote_code=False).to(device)
    if subject.form == "absorbed":
        absorb(model)
    return model.eval()


def _make_one_token_cache(model: Any) -> DynamicCache:
    """A cache that contains one token, from which the shapes of the model's cache can be read."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(token, past_key_values=cache, use_cache=True)
    return cache


def _count_cache_bytes(cache: Any) -> int:
    """The bytes of all keys and values in ``cache``."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _time_context_and_batch(
    model: Any, request: BenchRequest, context: int, batch: int
) -> dict[str, Any]:
    """The speed of prefill and decoding and the memory, for ``batch`` sequences of ``context``
    tokens. The prefill is shortened, and has fewer sequences, so that it has at most
    ``prefill_tokens`` tokens.
    """
    device = model.device
    # Where the system does not allow this, the peak is that since the process started.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM alone
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    figures: dict[str, Any] = {}
    if length := min(context, request.prefill_tokens):
        sequences = max(1, min(batch, request.prefill_tokens // length))
        vocabulary = model.config.get_text_config().vocab_size
        tokens = torch.randint(vocabulary, (sequences, length), device=device)
        times = time_calls(lambda: model(tokens, use_cache=True, logits_to_keep=1), request.seconds)
        figures["prefill_tokens_per_s"] = tokens.numel() / statistics.median(times)
    cache: Any = DynamicCache(config=model.config)
    for index, layer in enumerate(_make_one_token_cache(model).layers):
        keys, values = (
            one.new_empty(batch, one.shape[1], context, one.shape[3]).normal_()
            for one in (layer.keys, layer.values)
        )
        cache.update(keys, values, index)
    cache_bytes = _count_cache_bytes(cache)
    # Which token is decoded makes no difference to the time.
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    times = time_calls(lambda: model(token, past_key_values=cache, use_cache=True), request.seconds)
    seconds = statistics.median(times)
    return figures | {
        "step_ms": 1e3 * seconds,
        "steps": len(times),
        "decode_tokens_per_s": batch / seconds,
        "cache_bytes": cache_bytes,
        "peak_bytes": read_peak_memory(device),
    }


def time_calls(call: Callable[[], Any], seconds: float) -> list[float]:
    """Run ``call`` for about ``seconds``, 3 to 50 times, and return the seconds of each call.

    One untimed call goes before them: it also compiles, allocates and fills caches.
    """
    call()
    times: list[float] = []
    while len(times) < _FEWEST_CALLS or (len(times) < _MOST_CALLS and sum(times) < seconds):
        start = timer()
        call()
        times.append(timer() - start)
    return times


def read_peak_memory(device: torch.device) -> int | None:
    """Peak memory in bytes since it was reset: allocated by torch on CUDA, or resident in the
    process on a CPU; None where the system does not report it.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = search_proc("self/status", r"VmHWM:\s*(\d+)")
    return None if peak is None else int(peak) << 10


def read_processor_name(device: torch.device) -> str:
    """The product name of the GPU or CPU; "CPU" where the system does not report it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    # platform has no name of the CPU on Linux.
    return search_proc("cpuinfo", r"model name\s*:\s*(.*\S)") or "CPU"
