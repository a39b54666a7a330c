"""Process that times one model for ``kvfold bench``: ``python -m
kvfold.convert.measure.bench_worker TASK RESULT``.

TASK has the pickled arguments of ``run``; the rows are written to RESULT as JSON. Decoding is timed
on a cache filled with seeded random values, so it needs no prefill; the prefill is timed
separately.
"""

import gc
import json
import math
import os
import pickle
import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, DynamicCache, StaticCache

from kvfold.attention.checkpoints.registered import register_model
from kvfold.attention.drift.recording import attention_name
from kvfold.attention.drift.streams import layer_list
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.device import free_memory
from kvfold.convert.errors import InputError
from kvfold.convert.measure.bench import Subject, step_costs
from kvfold.convert.measure.machine import Clock, peak_memory, processor, repeat, reset_peak
from kvfold.convert.request import BenchRequest
from kvfold.convert.stream.parameters import load_model
from kvfold.convert.stream.stock import AutoModelForCausalLM, empty_model, errors_as_input_errors

_SEED = 0
# Slots of a static cache beyond the context: each timed step fills one.
_ROOM = 64


def run(
    subject: Subject, request: BenchRequest, device_name: str, dtype_name: str, prefill_tokens: int
) -> dict[str, Any]:
    """A row for each context and batch, smallest first, with the threads, the torch version and the
    processor. ``prefill_tokens`` are those of all sequences together.
    """
    torch.manual_seed(_SEED)
    if request.threads:
        torch.set_num_threads(request.threads)
    device = torch.device(device_name)
    dtype = getattr(torch, dtype_name)
    register_model(str(subject.config.get("model_type")))
    if subject.folder is not None:
        empty_model(subject.config)  # raises the error of a wrong value
    config = AutoConfig.for_model(**subject.config)
    weights = count_parameters(config)
    # Measured before the model is loaded: its weights are part of what a combination needs.
    free = free_memory(device)
    model = None
    rows = []
    # Smallest first, so that the model is loaded only if anything fits.
    pairs = sorted(
        product(request.contexts, request.batches), key=lambda pair: (math.prod(pair), pair)
    )
    for context, batch in pairs:
        row: dict[str, Any] = {"context": context, "batch": batch}
        rows.append(row)
        # As much of the context as `prefill_tokens` allows, then as many sequences.
        length = min(context, prefill_tokens)
        sequences = max(1, min(batch, prefill_tokens // length)) if length else 0
        cost = step_costs(subject, weights, dtype.itemsize, context, batch, sequences * length)
        if free is not None and cost.memory > free:
            row |= {"needed_bytes": cost.memory, "free_bytes": free}
            continue
        if model is None:
            model = make_model(subject, config, dtype, device)
        reset_peak(device)
        if length:
            row |= _time_prefill(model, sequences, length, request.seconds)
            _collect(device)
        row |= _time_decoding(model, request.cache, context, batch, request.seconds)
        row |= {
            "read_bytes": cost.read_bytes,
            "operations": cost.operations,
            "cache_bytes_formula": cost.cache_bytes,
            "peak_bytes": peak_memory(device),
        }
        _collect(device)
    return {
        "rows": rows,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": processor(device),
    }


def count_parameters(config: Any) -> tuple[int, int]:
    """The model's number of parameters, and how many of these a decoding step reads; built on the
    meta device.
    """
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in empty.parameters())
    embedding = empty.get_input_embeddings().weight
    head = empty.get_output_embeddings().weight
    return total, total if embedding is head else total - embedding.numel()


def make_model(subject: Subject, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the subject's checkpoint, or build ``config`` with random weights; absorb the model if
    its form says so.
    """
    if subject.folder is None:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        with closing(open_checkpoint(subject.folder)) as checkpoint:
            model = load_model(checkpoint, dtype, trust_remote_code=False).to(device)
    model = model.eval().requires_grad_(False)
    if subject.form == "absorbed":
        from kvfold.attention import absorb

        absorb(model)
    return model


@torch.no_grad()
def _time_prefill(model: Any, sequences: int, length: int, limit: float) -> dict[str, Any]:
    tokens = torch.randint(
        model.config.vocab_size, (sequences, length), generator=torch.Generator().manual_seed(_SEED)
    )
    call = partial(model, tokens.to(model.device), use_cache=True, logits_to_keep=1)
    seconds = statistics.median(repeat(Clock(model.device), call, limit, warm=1, fewest=1, most=10))
    return {
        "prefill_tokens": [sequences, length],
        "prefill_tokens_per_s": sequences * length / seconds,
    }


@torch.no_grad()
def _time_decoding(model: Any, kind: str, context: int, batch: int, limit: float) -> dict[str, Any]:
    clock = Clock(model.device)
    cache = filled_cache(model, kind, context, batch)
    cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    if kind == "static":
        cache_bytes = cache_bytes * context // (context + _ROOM)
    # Which token is decoded makes no difference to the time.
    token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    step = partial(model, token, past_key_values=cache, use_cache=True)
    with _attention_marks(model, clock) as marks:
        times = repeat(clock, step, limit, most=_ROOM - 4)
    spans = [clock.between(*pair) for pair in zip(marks[::2], marks[1::2], strict=True)]
    layers = len(cache.layers)
    attention = [sum(spans[i : i + layers]) for i in range(0, len(spans), layers)]
    seconds = statistics.median(times)
    return {
        "step_ms": 1e3 * seconds,
        "steps": len(times),
        "decode_tokens_per_s": batch / seconds,
        # The last steps are those that were timed.
        "attention_ms": 1e3 * statistics.median(attention[-len(times) :]),
        "cache_bytes": cache_bytes,
    }


def filled_cache(model: Any, kind: str, context: int, batch: int) -> Any:
    """A cache of ``context`` tokens with seeded standard normal values, in the shapes that the
    model caches.
    """
    # One token shows what the model caches: heads and dims, or a latent and a rotary key.
    probe = DynamicCache(config=model.config)
    model(
        torch.zeros(1, 1, dtype=torch.long, device=model.device),
        past_key_values=probe,
        use_cache=True,
    )
    cache: Any = DynamicCache(config=model.config)
    if kind == "static":
        cache = StaticCache(model.config, max_cache_len=context + _ROOM)
    generator = torch.Generator(model.device).manual_seed(_SEED)

    for index, layer in enumerate(probe.layers):
        keys = layer.keys.new_empty(batch, layer.keys.shape[1], context, layer.keys.shape[3])
        values = layer.values.new_empty(*keys.shape[:3], layer.values.shape[3])
        cache.update(keys.normal_(generator=generator), values.normal_(generator=generator), index)
    return cache


@contextmanager
def _attention_marks(model: Any, clock: Clock) -> Iterator[list[Any]]:
    """The times before and after each call of an attention module in the block, alternating."""
    marks: list[Any] = []

    def mark(*_: Any) -> None:
        marks.append(clock.mark())

    hooks = []
    for layer in layer_list(model)[1]:
        module = layer.get_submodule(attention_name(layer))
        hooks.append(module.register_forward_pre_hook(mark))
        hooks.append(module.register_forward_hook(mark))
    yield marks
    for hook in hooks:
        hook.remove()


def _collect(device: torch.device) -> None:
    """Free the last measurement's memory, so that it does not count toward the next one."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def end_with_parent() -> None:
    """Exit when standard input closes, because then the parent was killed and the result is not
    needed.
    """
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def run_task(task: Path, result: Path) -> None:
    """Write what ``run`` returns for the pickled arguments in ``task``; the lines of an InputError
    as ``refused``.
    """
    try:
        with errors_as_input_errors("config.json"):
            values = run(*pickle.loads(task.read_bytes()))
    except InputError as error:
        values = {"refused": [error.message, *error.details]}
    result.write_text(json.dumps(values))


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    run_task(Path(sys.argv[1]), Path(sys.argv[2]))
