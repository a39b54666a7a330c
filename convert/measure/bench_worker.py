"""One model of ``kvfold bench`` in its own process: ``python -m kvfold.convert.measure.bench_worker TASK RESULT``.

TASK is a JSON file (``Task``), RESULT gets the rows. A decoding step is timed on a cache filled with seeded random
values, so that no prefill is needed for it; the prefill is timed apart.
"""

import gc
import json
import os
import statistics
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, StaticCache

from kvfold.attention.checkpoints.registered import register_model
from kvfold.attention.drift.frame import attention_of, layer_list
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.measure.bench_costs import Weights, costs
from kvfold.convert.measure.bench_models import Subject
from kvfold.convert.measure.clock import Clock, free_memory, peak_memory, repeat, reset_peak
from kvfold.convert.measure.machine import processor
from kvfold.convert.stream.auto import AutoModelForCausalLM
from kvfold.convert.stream.loading import load_model as load_checkpoint

_SEED = 0


@dataclass(frozen=True)
class Task:
    subject: Subject
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    device: str
    dtype: str
    cache: str
    prefill_tokens: int
    seconds: float  # to spend on the timed steps of a combination
    threads: int | None


def run(task: Task) -> dict[str, Any]:
    """Rows of every combination, and the machine."""
    torch.manual_seed(_SEED)
    if task.threads:
        torch.set_num_threads(task.threads)
    device, dtype = torch.device(task.device), getattr(torch, task.dtype)
    register_model(str(task.subject.config.get("model_type")))
    config = AutoConfig.for_model(**task.subject.config)
    weights = count_parameters(config)
    pairs = sorted((context * batch, context, batch) for context in task.contexts for batch in task.batches)
    needed = {pair: _memory(task, weights, *pair[1:]) for pair in pairs}
    free = free_memory(device)
    model = None
    rows = []
    for pair in pairs:
        row: dict[str, Any] = {"needed_bytes": needed[pair], "free_bytes": free}
        if needed[pair] <= free:
            model = model if model is not None else load_model(task.subject, config, dtype, device)
            row = _measure(task, model, weights, *pair[1:])
            _free_cached(device)
        rows.append({"context": pair[1], "batch": pair[2], **row})
    return {"rows": rows, "threads": torch.get_num_threads(), "torch": torch.__version__, "device": processor(device)}


def count_parameters(config: Any) -> Weights:
    """Of the model of ``config``, which is made on the meta device."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in empty.parameters())
    embedding, head = empty.get_input_embeddings().weight, empty.get_output_embeddings().weight
    return Weights(total, total if embedding is head else total - embedding.numel())


def _memory(task: Task, weights: Weights, context: int, batch: int) -> int:
    size = getattr(torch, task.dtype).itemsize
    prefill = _prefill_size(task, context, batch)
    return costs(task.subject.config, task.subject.form, weights, size, context, batch, prefill[0] * prefill[1]).memory


def load_model(subject: Subject, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The subject's checkpoint, or random weights of ``config``; absorbed where the subject is."""
    if subject.folder is None:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        checkpoint = open_checkpoint(subject.folder)  # dequantized, where its weights are quantized
        model = load_checkpoint(checkpoint, dtype, trust_remote_code=False).to(device)
        checkpoint.close()
    model = model.eval().requires_grad_(False)
    if subject.form == "absorbed":
        from kvfold.attention import absorb

        absorb(model)
    return model


@torch.no_grad()
def _measure(task: Task, model: Any, weights: Weights, context: int, batch: int) -> dict[str, Any]:
    device = model.device
    reset_peak(device)
    prefill = _time_prefill(task, model, context, batch)
    _free_cached(device)
    clock = Clock(device)
    cache = filled_cache(model, task.cache, context, batch, context + 64)
    cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    if task.cache == "static":
        cache_bytes = cache_bytes * context // (context + 64)
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    attention = _attention_clock(model, device)
    times = repeat(clock, lambda: model(token, past_key_values=cache, use_cache=True), task.seconds, most=60)
    step = statistics.median(times)
    cost = costs(task.subject.config, task.subject.form, weights, model.dtype.itemsize, context, batch)
    return {
        **prefill,
        "step_ms": 1e3 * step,
        "steps": len(times),
        "decode_tokens_per_s": batch / step,
        "attention_ms": 1e3 * attention(len(times)),
        "cache_bytes": cache_bytes,
        "peak_bytes": peak_memory(device),
        "read_bytes": cost.read_bytes,
        "operations": cost.operations,
        "cache_bytes_formula": cost.cache_bytes,
    }


def _prefill_size(task: Task, context: int, batch: int) -> tuple[int, int]:
    """Sequences and tokens of each: the whole combination, or as much of it as ``prefill_tokens`` allows."""
    length = min(context, max(1, task.prefill_tokens))
    return max(1, min(batch, task.prefill_tokens // length)), length


def _time_prefill(task: Task, model: Any, context: int, batch: int) -> dict[str, Any]:
    if task.prefill_tokens == 0:
        return {}
    sequences, length = _prefill_size(task, context, batch)
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(model.config.vocab_size, (sequences, length), generator=generator).to(model.device)
    call = lambda: model(tokens, use_cache=True, logits_to_keep=1)  # noqa: E731 -- one expression, timed below
    times = repeat(Clock(model.device), call, task.seconds, warm=1, fewest=1, most=10)
    seconds = statistics.median(times)
    return {"prefill_tokens": [sequences, length], "prefill_tokens_per_s": sequences * length / seconds}


def filled_cache(model: Any, kind: str, context: int, batch: int, room: int) -> Any:
    """A cache of ``context`` random tokens (standard normal, seeded), of the shapes that the model itself caches."""
    probe = DynamicCache(config=model.config)
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=probe, use_cache=True)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=room)
    generator = torch.Generator(model.device).manual_seed(_SEED)
    for index, layer in enumerate(probe.layers):
        cache.update(*(_random(part, context, batch, generator) for part in (layer.keys, layer.values)), index)
    return cache


def _random(like: Tensor, context: int, batch: int, generator: torch.Generator) -> Tensor:
    shape = (batch, like.shape[1], context, like.shape[3])
    return torch.empty(shape, dtype=like.dtype, device=like.device).normal_(generator=generator)


def _attention_clock(model: Any, device: torch.device) -> Callable[[int], float]:
    """Clocks all attention modules, projections and cache included. Call it with the steps for seconds per step."""
    clock = Clock(device)
    marks: list[tuple[Any, Any]] = []
    starts: list[Any] = []
    modules = [attention_of(layer) for layer in layer_list(model)[1]]
    hooks = []
    for module in modules:
        hooks.append(module.register_forward_pre_hook(lambda *_: starts.append(clock.mark())))
        hooks.append(module.register_forward_hook(lambda *_: marks.append((starts.pop(), clock.mark()))))

    def finish(steps: int) -> float:
        for hook in hooks:
            hook.remove()
        spans = [clock.between(*pair) for pair in marks]
        by_step = [sum(spans[i : i + len(modules)]) for i in range(0, len(spans), len(modules))]
        return statistics.median(by_step[-steps:]) if by_step else 0.0

    return finish


def _free_cached(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def read_task(text: str) -> Task:
    fields = json.loads(text)
    fields["subject"] = Subject(**fields["subject"])
    return Task(**{**fields, "contexts": tuple(fields["contexts"]), "batches": tuple(fields["batches"])})


def write_task(task: Task) -> str:
    return json.dumps(asdict(task))


def end_with_parent() -> None:
    """End this process when its standard input ends: whoever started it was killed, and nobody waits for the result."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    Path(sys.argv[2]).write_text(json.dumps(run(read_task(Path(sys.argv[1]).read_text()))))
