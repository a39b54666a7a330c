"""Stages that time decoding: the latent kernel against the card's bandwidth and others' kernels, and whole models."""

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from gpu.card import Check, graph_seconds, rates, seconds
from measured import Row
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from kvfold.attention.kernel import decode_latent
from kvfold.convert import bench_checkpoints
from kvfold.convert.device import free_memory
from kvfold.convert.measure.bench import SHAPES, step_costs, subjects
from kvfold.convert.measure.bench_worker import count_parameters, filled_cache, make_model
from kvfold.convert.request import BenchRequest

# Aims: the share of the copy bandwidth from these sizes on; FlashMLA reads 576 channels at 3000 of 3350 GB/s.
COPY_SHARE, FROM_CONTEXT, FROM_BATCH = 0.85, 8192, 16
NOPE = VALUE = 128  # of the expanded heads
PAGE = 64  # slots of a page in the caches of FlashMLA and FlashInfer
SHAPES_HERE = ("llama-2-7b", "llama-3-8b")


def kernel(check: Check) -> Iterator[Row]:
    """Latent decoding by split, heads, context and batch, in bfloat16: bytes of cache per second, and other kernels."""
    copied = rates(check.device, check.rehearse)[0]
    yield {"copy_gb_per_s": copied / 1e9}
    splits, heads = ((512, 64), (256, 64), (128, 64)), (32, 128, 16, 64)
    contexts, batches = (8192, 32768, 2048, 65536), (16, 64, 4, 1)
    if check.rehearse:
        splits, heads, contexts, batches = ((32, 16), (16, 16)), (4,), (64,), (1, 2)
    for (rank, rope), count, context, batch in product(splits, heads, contexts, batches):
        inputs = _latents(batch, count, context, rank, rope, check.device)
        read = sum(each.nbytes for each in inputs[2:])
        call = partial(decode_latent, *inputs, (NOPE + rope) ** -0.5)
        time = graph_seconds(call, check.device)
        row: Row = {"split": f"{rank}+{rope}", "heads": count, "context": context, "batch": batch, "us": 1e6 * time}
        row |= {"launched_us": 1e6 * seconds(call, check.device), "gb_per_s": read / time / 1e9}
        row["of_copy"] = read / time / copied
        if context >= FROM_CONTEXT and batch >= FROM_BATCH:
            row |= {"aim": COPY_SHARE, "reached": row["of_copy"] >= COPY_SHARE}
        if (rank, rope) == splits[0]:
            row |= {f"{name}_us": 1e6 * each for name, each in _others(inputs, check.device)}
        yield row


def _latents(batch: int, heads: int, context: int, rank: int, rope: int, device: torch.device) -> list[Tensor]:
    """Queries, rotary queries, latents and rotary keys, the last two from one cache as engines keep it."""
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    stored = random(batch, context, rank + rope)
    return [random(batch, heads, 1, rank), random(batch, heads, 1, rope), stored[..., :rank], stored[..., rank:]]


def _others(inputs: list[Tensor], device: torch.device) -> Iterator[tuple[str, float]]:
    """Seconds of torch's attention over expanded keys and values where they fit, and of the packages that are there."""
    query, rope, latent = inputs[:3]
    batch, heads, context = len(query), query.shape[1], latent.shape[1]
    free = free_memory(device)
    if free is None or 2 * batch * heads * context * (NOPE + VALUE + rope.shape[-1]) < free // 3:
        random = partial(torch.randn, device=device, dtype=query.dtype)
        keys = random(batch, heads, context, NOPE + rope.shape[-1])
        call = partial(scaled_dot_product_attention, keys[:, :, -1:], keys, random(batch, heads, context, VALUE))
        yield "sdpa_expanded", graph_seconds(call, device)
    for name, make in (("flash_mla", _flash_mla), ("flashinfer", _flashinfer)):
        with suppress(ImportError):
            yield name, seconds(make(*inputs), device)


def _flash_mla(query: Tensor, rope: Tensor, latent: Tensor, key: Tensor) -> Callable[[], Any]:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    pages, lengths, table = _pages(latent)
    plan, splits = get_mla_metadata(lengths, query.shape[1], 1)
    stored = torch.cat([latent, key], -1).view(pages, PAGE, 1, -1)
    whole = torch.cat([query, rope], -1).transpose(1, 2).contiguous()
    width, scale = latent.shape[-1], (NOPE + rope.shape[-1]) ** -0.5
    return lambda: flash_mla_with_kvcache(whole, stored, table, lengths, width, plan, splits, scale, False)


def _flashinfer(query: Tensor, rope: Tensor, latent: Tensor, key: Tensor) -> Callable[[], Any]:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    pages, lengths, table = _pages(latent)
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1 << 27, dtype=torch.int8, device=query.device), backend="auto")
    of_query = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
    heads, (width, turned), scale = query.shape[1], (latent.shape[-1], rope.shape[-1]), (NOPE + rope.shape[-1]) ** -0.5
    wrapper.plan(
        of_query, of_query * table.shape[1], table.flatten(), lengths, heads, width, turned, PAGE, False, scale,
        query.dtype, latent.dtype,
    )  # fmt: skip
    stored = latent.reshape(pages, PAGE, width).contiguous(), key.reshape(pages, PAGE, turned).contiguous()
    return lambda: wrapper.run(query[:, :, 0], rope[:, :, 0], *stored)


def _pages(latent: Tensor) -> tuple[int, Tensor, Tensor]:
    """The number of pages, the sequences' lengths and their pages in order."""
    batch, context = latent.shape[:2]
    numbers = partial(torch.arange, dtype=torch.int32, device=latent.device)
    pages = batch * context // PAGE
    return pages, numbers(batch) * 0 + context, numbers(pages).view(batch, -1)


def decode(check: Check) -> Iterator[Row]:
    """Whole decoding steps of MHA, GQA-8 and MLA, stock and absorbed, at known shapes; the cache that fits."""
    shapes, caches = (("tiny",), ("static",)) if check.rehearse else (SHAPES_HERE, ("static", "dynamic"))
    contexts, batches, limit = ((64,), (1, 2), 0.01) if check.rehearse else ((2048, 8192, 32768), (1, 16, 64), 0.4)
    dtype = "float32" if check.rehearse else "bfloat16"
    for shape, kind in product(shapes, caches):
        asked = BenchRequest(
            shape=shape, layers=2, contexts=contexts, batches=batches, device=check.device.type, dtype=dtype,
            cache=kind, prefill_tokens=0, seconds=limit, quiet=True,
        )  # fmt: skip
        for row in bench_checkpoints(asked).to_dict()["rows"]:
            yield {"shape": shape, "layers": 2, "cache": kind, **row}
        if kind == "static":
            yield from _graphs(asked, check)
            yield from _capacity(asked, check)


@torch.no_grad()
def _graphs(asked: BenchRequest, check: Check) -> Iterator[Row]:
    """A step of each kind replayed from a CUDA graph over a static cache, where stock transformers can be captured."""
    context, batch = asked.contexts[-2:][0], asked.batches[-2:][0]
    dtype = getattr(torch, str(asked.dtype))
    for subject in subjects(asked):
        about = {"shape": asked.shape, "layers": 2, "cache": "static, CUDA graph", "model": subject.label}
        about |= {"context": context, "batch": batch}
        model = stored = None
        try:
            model = make_model(subject, AutoConfig.for_model(**subject.config), dtype, check.device)
            stored = filled_cache(model, "static", context, batch)
            token = torch.zeros(batch, 1, dtype=torch.long, device=check.device)
            limit = 0.4 if check.device.type == "cuda" else 0.0
            step = graph_seconds(partial(model, token, past_key_values=stored, use_cache=True), check.device, limit)
            yield {**about, "step_ms": 1e3 * step, "decode_tokens_per_s": batch / step}
        except Exception as error:  # stock code that waits for the device cannot be captured: that is the result
            yield {**about, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
        del model, stored
        gc.collect()
        if check.device.type == "cuda":
            torch.cuda.empty_cache()


def _capacity(asked: BenchRequest, check: Check) -> Iterator[Row]:
    """The most tokens of cache beside all layers' weights, by the same formula that keeps runs within memory."""
    free, size, depth = (
        free_memory(check.device),
        getattr(torch, str(asked.dtype)).itemsize,
        SHAPES[str(asked.shape)][3],
    )
    for subject in subjects(BenchRequest(shape=asked.shape, contexts=asked.contexts)):
        weights = count_parameters(AutoConfig.for_model(**subject.config))
        none, some = (step_costs(subject, weights, size, tokens, 1).memory for tokens in (0, 1 << 20))
        tokens = None if free is None else max(0, int((free - none) / (some - none) * (1 << 20)))
        yield {"shape": asked.shape, "layers": depth, "model": subject.label, "fits_tokens": tokens}
