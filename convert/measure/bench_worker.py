"""One model of ``kvfold bench`` in its own process: ``python -m kvfold.convert.measure.bench_worker TASK RESULT``.

TASK is a JSON file (``BenchTask``), RESULT gets the rows. A decoding step is timed on a cache filled with seeded random
values, so that no prefill is needed for it; the prefill is timed apart.
"""

import gc
import json
import os
import statistics
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, StaticCache

from kvfold.attention.checkpoints.registered import register_model
from kvfold.attention.drift.frame import attention_name, layer_list
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.device import free_memory
from kvfold.convert.measure.bench_models import BenchTask, ParameterCount, Subject, step_costs
from kvfold.convert.measure.machine import Clock, peak_memory, processor, repeat, reset_peak
from kvfold.convert.stream.stock import AutoModelForCausalLM, load_model

_SEED = 0
# Slots of a static cache beyond the context: each timed step fills one.
_ROOM = 64


def run(task: BenchTask) -> dict[str, Any]:
    """Rows of every context and batch, smallest first, and the machine."""
    torch.manual_seed(_SEED)
    if task.options.threads:
        torch.set_num_threads(task.options.threads)
    device, dtype = torch.device(task.device), getattr(torch, task.dtype)
    register_model(str(task.subject.config.get("model_type")))
    config = AutoConfig.for_model(**task.subject.config)
    weights = count_parameters(config)
    # Measured before the model is loaded: its weights are part of what a combination needs.
    free, model, rows = free_memory(device), None, []
    pairs = [(context, batch) for context in task.options.contexts for batch in task.options.batches]
    # Smallest first, so that the model is loaded only if anything fits.
    for context, batch in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair)):
        sequences, length = task.prefill_size(context, batch)
        shape = task.subject.config, task.subject.form, weights, dtype.itemsize
        needed = step_costs(*shape, context, batch, sequences * length).memory
        row: dict[str, Any] = {"context": context, "batch": batch}
        if free is not None and needed > free:
            row |= {"needed_bytes": needed, "free_bytes": free}
        else:
            model = model if model is not None else make_model(task.subject, config, dtype, device)
            row |= _measure(task, model, weights, context, batch)
            _collect(device)
        rows.append(row)
    return {"rows": rows, "threads": torch.get_num_threads(), "torch": torch.__version__, "device": processor(device)}


def count_parameters(config: Any) -> ParameterCount:
    """Parameters of the model of ``config``, which is made on the meta device."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in empty.parameters())
    embedding, head = empty.get_input_embeddings().weight, empty.get_output_embeddings().weight
    return ParameterCount(total, total if embedding is head else total - embedding.numel())


def make_model(subject: Subject, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The subject's checkpoint, or random weights of ``config``; absorbed if the subject is."""
    if subject.folder is None:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        # Quantized weights are dequantized here, as in a conversion.
        checkpoint = open_checkpoint(subject.folder)
        model = load_model(checkpoint, dtype, trust_remote_code=False).to(device)
        checkpoint.close()
    model = model.eval().requires_grad_(False)
    if subject.form == "absorbed":
        from kvfold.attention import absorb

        absorb(model)
    return model


@torch.no_grad()
def _measure(task: BenchTask, model: Any, weights: ParameterCount, context: int, batch: int) -> dict[str, Any]:
    device = model.device
    reset_peak(device)
    prefill = _time_prefill(task, model, *task.prefill_size(context, batch))
    _collect(device)
    clock, kind = Clock(device), task.options.cache
    cache = filled_cache(model, kind, context, batch)
    cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    if kind == "static":
        cache_bytes = cache_bytes * context // (context + _ROOM)
    # Which token is decoded makes no difference to the time.
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    attention = _attention_clock(model, device)
    call = lambda: model(token, past_key_values=cache, use_cache=True)  # noqa: E731 -- one expression, timed below
    times = repeat(clock, call, task.options.seconds, most=_ROOM - 4)
    step = statistics.median(times)
    cost = step_costs(task.subject.config, task.subject.form, weights, model.dtype.itemsize, context, batch)
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


def _time_prefill(task: BenchTask, model: Any, sequences: int, length: int) -> dict[str, Any]:
    if length == 0:
        return {}
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(model.config.vocab_size, (sequences, length), generator=generator).to(model.device)
    call = lambda: model(tokens, use_cache=True, logits_to_keep=1)  # noqa: E731 -- one expression, timed below
    seconds = statistics.median(repeat(Clock(model.device), call, task.options.seconds, warm=1, fewest=1, most=10))
    return {"prefill_tokens": [sequences, length], "prefill_tokens_per_s": sequences * length / seconds}


def filled_cache(model: Any, kind: str, context: int, batch: int) -> Any:
    """A cache of ``context`` random tokens (standard normal, seeded), of the shapes that the model itself caches."""
    # One token shows what the model caches: heads and dims, or a latent and a rotary key.
    probe = DynamicCache(config=model.config)
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=probe, use_cache=True)
    static = kind == "static"
    cache = StaticCache(model.config, max_cache_len=context + _ROOM) if static else DynamicCache(config=model.config)
    generator = torch.Generator(model.device).manual_seed(_SEED)

    def random(like: Tensor) -> Tensor:
        shape = (batch, like.shape[1], context, like.shape[3])
        return torch.empty(shape, dtype=like.dtype, device=like.device).normal_(generator=generator)

    for index, layer in enumerate(probe.layers):
        cache.update(random(layer.keys), random(layer.values), index)
    return cache


def _attention_clock(model: Any, device: torch.device) -> Callable[[int], float]:
    """Clocks all attention modules, projections and cache included. Call it with the steps for seconds per step."""
    clock = Clock(device)
    marks: list[tuple[Any, Any]] = []
    starts: list[Any] = []
    modules = [layer.get_submodule(attention_name(layer)) for layer in layer_list(model)[1]]
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


def _collect(device: torch.device) -> None:
    """Free what the last measurement held, so that it does not count as the next one's memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def end_with_parent() -> None:
    """End this process when its standard input ends: its parent was killed, and nobody waits for the result."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    Path(sys.argv[2]).write_text(json.dumps(run(BenchTask.from_json(Path(sys.argv[1]).read_text()))))
