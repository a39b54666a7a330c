"""Stages that time decoding: the latent kernel, its tiles and others' kernels, and whole models."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from gpu.card import Check, attempt, graph_seconds, rates, seconds
from gpu.precise import compared
from measured import Row
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from kvfold.attention.kernel import Tile, decode_latent
from kvfold.convert import bench_checkpoints
from kvfold.convert.device import free_memory
from kvfold.convert.measure.bench import Subject, step_costs, subjects
from kvfold.convert.measure.bench_worker import count_parameters, filled_cache, make_model
from kvfold.convert.request import BenchRequest

# Aims: the share of the copy bandwidth from these sizes on; FlashMLA reads 576 channels at 3000 of
# 3350 GB/s.
COPY_SHARE = 0.85
FROM_CONTEXT = 8192
FROM_BATCH = 16
NOPE = VALUE = 128  # of the expanded heads
SCALE = 0.05  # of scores that are not judged
PAGE = 64  # slots of a page in the caches of FlashMLA and FlashInfer
JUDGED = 1 << 16  # tokens of cache, up to which results are compared with those in float64


def kernel(check: Check) -> Iterator[Row]:
    """Latent decoding by split, heads, context and batch, in 16 bits: bytes of cache per second,
    and other kernels.
    """
    yield {"copy_gb_per_s": rates(check.device, check.rehearse)[0] / 1e9}
    splits = ((512, 64), (256, 64), (128, 64))
    heads = (32, 128, 16, 64)
    contexts = (8192, 32768, 2048, 65536)
    batches = (16, 64, 4, 1)
    if check.rehearse:
        splits = ((32, 16), (16, 16))
        heads = (4,)
        contexts = (64,)
        batches = (1, 2)
    for split, count, context, batch in product(splits, heads, contexts, batches):
        row = {"split": "{}+{}".format(*split), "heads": count, "context": context, "batch": batch}
        measure = partial(_kernel, check, batch, count, context, *split, others=split == splits[0])
        yield attempt(row, measure) if check.left > 5 else {**row, "skipped": "no time is left"}


def _kernel(
    check: Check, batch: int, heads: int, context: int, rank: int, rope: int, others: bool
) -> Row:
    # Triton's interpreter cuts bits off where a card rounds to bfloat16.
    dtype = torch.float16 if check.rehearse else torch.bfloat16
    inputs = _latents(batch, heads, context, rank, rope, dtype, check.device)
    scale = (NOPE + rope) ** -0.5
    read = sum(each.nbytes for each in inputs[2:])
    call = partial(decode_latent, *inputs, scale)
    spent = graph_seconds(call, check.device)
    launched = seconds(call, check.device)
    row: Row = {"us": 1e6 * spent, "launched_us": 1e6 * launched, "gb_per_s": read / spent / 1e9}
    row["of_copy"] = read / spent / rates(check.device, check.rehearse)[0]
    if context >= FROM_CONTEXT and batch >= FROM_BATCH:
        row |= {"aim": COPY_SHARE, "reached": row["of_copy"] >= COPY_SHARE}
    if batch * context <= JUDGED:
        exact = _formula(*(each.double() for each in inputs), scale)
        row = compared(row, [call()], [_formula(*inputs, scale)], [exact])
    return row | (dict(_others(inputs, check.device)) if others else {})


def _formula(query: Tensor, rope: Tensor, latent: Tensor, key: Tensor, scale: float) -> Tensor:
    scores = scale * (query @ latent[:, None].mT + rope @ key[:, None].mT)
    return scores.softmax(-1) @ latent[:, None]


def _latents(
    batch: int,
    heads: int,
    context: int,
    rank: int,
    rope: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Queries, rotary queries, latents and rotary keys, the last two from one cache as engines keep
    it.
    """
    random = partial(torch.randn, device=device, dtype=dtype)
    stored = random(batch, context, rank + rope)
    return [
        random(batch, heads, 1, rank),
        random(batch, heads, 1, rope),
        stored[..., :rank],
        stored[..., rank:],
    ]


def tiles(check: Check) -> Iterator[Row]:
    """Latent decoding at 512+64 with other tiles than the kernel chooses, by heads: bytes of cache
    per second.
    """
    batch, context, split, heads = (
        (1, 64, (32, 16), (4,)) if check.rehearse else (32, 8192, (512, 64), (32, 64, 16))
    )
    others = [Tile(*each) for each in product((16, 32, 64), (32, 64, 128), (4, 8), (2, 3))]
    for count in heads:
        inputs = _latents(
            batch,
            count,
            context,
            *split,
            torch.float16 if check.rehearse else torch.bfloat16,
            check.device,
        )
        expected = decode_latent(*inputs, SCALE)
        for tile in (None, *others[: 1 if check.rehearse else None]):
            about = {
                "heads": count,
                "context": context,
                "batch": batch,
                "tile": tile and tile._asdict(),
            }
            yield (
                {**about, **_tile(check, inputs, tile, expected)}
                if check.left > 5
                else {**about, "skipped": "no time"}
            )


def _tile(check: Check, inputs: list[Tensor], tile: Tile | None, expected: Tensor) -> Row:
    call = partial(decode_latent, *inputs, SCALE, tile=tile)
    try:
        torch.testing.assert_close(call(), expected, atol=0.01, rtol=0.01)
    except (
        Exception
    ) as error:  # more shared memory or registers than the card has: that is its result
        return {
            "refused": f"{type(error).__name__}: {str(error)[:300]}",
            "right": not isinstance(error, AssertionError),
        }
    return {
        "gb_per_s": (
            sum(each.nbytes for each in inputs[2:]) / graph_seconds(call, check.device) / 1e9
        )
    }


def _others(inputs: list[Tensor], device: torch.device) -> Iterator[tuple[str, Any]]:
    """Times of torch's attention over expanded keys and values where they fit, and of the packages
    that are there.
    """
    query, rope, latent = inputs[:3]
    batch = len(query)
    heads = query.shape[1]
    context = latent.shape[1]
    free = free_memory(device)
    if free is None or 2 * batch * heads * context * (NOPE + VALUE + rope.shape[-1]) < free // 3:
        random = partial(torch.randn, device=device, dtype=query.dtype)
        keys = random(batch, heads, context, NOPE + rope.shape[-1])
        call = partial(
            scaled_dot_product_attention,
            keys[:, :, -1:],
            keys,
            random(batch, heads, context, VALUE),
        )
        yield "sdpa_expanded_us", 1e6 * graph_seconds(call, device)
    for name, make in (("flash_mla", _flash_mla), ("flashinfer", _flashinfer)):
        try:
            yield f"{name}_us", 1e6 * seconds(make(*inputs), device)
        except ImportError:
            continue
        except (
            Exception
        ) as error:  # another release, or a shape that it does not take: that is its result
            yield f"{name}_refused", f"{type(error).__name__}: {str(error)[:300]}"


def _flash_mla(query: Tensor, rope: Tensor, latent: Tensor, key: Tensor) -> Callable[[], Any]:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    pages, lengths, table = _pages(latent)
    plan, splits = get_mla_metadata(lengths, query.shape[1], 1)
    stored = torch.cat([latent, key], -1).view(pages, PAGE, 1, -1)
    whole = torch.cat([query, rope], -1).transpose(1, 2).contiguous()
    width = latent.shape[-1]
    scale = (NOPE + rope.shape[-1]) ** -0.5
    return lambda: flash_mla_with_kvcache(
        whole, stored, table, lengths, width, plan, splits, scale, False
    )


def _flashinfer(query: Tensor, rope: Tensor, latent: Tensor, key: Tensor) -> Callable[[], Any]:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    pages, lengths, table = _pages(latent)
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(1 << 27, dtype=torch.int8, device=query.device), backend="auto"
    )
    of_query = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
    heads, (width, turned), scale = (
        query.shape[1],
        (latent.shape[-1], rope.shape[-1]),
        (NOPE + rope.shape[-1]) ** -0.5,
    )
    wrapper.plan(
        of_query, of_query * table.shape[1], table.flatten(), lengths, heads, width, turned, PAGE, False, scale,
        query.dtype, latent.dtype,
    )  # fmt: skip
    stored = (
        latent.reshape(pages, PAGE, width).contiguous(),
        key.reshape(pages, PAGE, turned).contiguous(),
    )
    return lambda: wrapper.run(query[:, :, 0], rope[:, :, 0], *stored)


def _pages(latent: Tensor) -> tuple[int, Tensor, Tensor]:
    """The number of pages, the sequences' lengths and their pages in order."""
    batch, context = latent.shape[:2]
    numbers = partial(torch.arange, dtype=torch.int32, device=latent.device)
    pages = batch * context // PAGE
    return pages, numbers(batch) * 0 + context, numbers(pages).view(batch, -1)


def decode(check: Check) -> Iterator[Row]:
    """Whole decoding steps of MHA, GQA-8 and MLA, stock and absorbed, at known shapes; the cache
    that fits.
    """
    shapes = ("tiny",) if check.rehearse else ("llama-2-7b", "llama-3-8b")
    contexts, batches, limit = (
        ((64,), (1, 2), 0.01) if check.rehearse else ((2048, 8192, 32768), (1, 16, 64), 0.4)
    )
    asked = [
        BenchRequest(
            shape=shape, layers=2, contexts=contexts, batches=batches, device=check.device.type, prefill_tokens=0,
            dtype="float32" if check.rehearse else "bfloat16", cache="static", seconds=limit, quiet=True,
        )
        for shape in shapes
    ]  # fmt: skip
    began = time.monotonic()
    for each in asked:
        yield from _steps(each)
        yield from _capacity(each, check)
    took = time.monotonic() - began
    for each in asked:
        yield from _graphs(each, check)
    if check.rehearse or check.left < took:
        yield {
            "cache": "dynamic",
            "skipped": f"{check.left:.0f} s are left, static caches took {took:.0f} s",
        }
        return
    for each in asked:
        yield from _steps(replace(each, cache="dynamic"))


def _steps(asked: BenchRequest) -> Iterator[Row]:
    about = {"shape": asked.shape, "layers": asked.layers, "cache": asked.cache}
    found = attempt(about, lambda: {"rows": bench_checkpoints(asked).to_dict()["rows"]})
    yield from ({**about, **row} for row in found["rows"]) if "rows" in found else (found,)


def _graphs(asked: BenchRequest, check: Check) -> Iterator[Row]:
    """A step of each kind replayed from a CUDA graph over a static cache, where stock transformers
    can be captured.
    """
    about = {"shape": asked.shape, "layers": asked.layers, "cache": "static, CUDA graph"}
    about |= {"context": asked.contexts[-2:][0], "batch": asked.batches[-2:][0]}
    # A capture that fails leaves torch's allocator and generator in the middle of it: the next
    # needs a new process.
    workers = partial(ProcessPoolExecutor, 1, get_context("spawn"))
    pool = workers()
    for subject in subjects(asked):
        work = partial(
            pool.submit,
            _graph,
            subject,
            str(asked.dtype),
            about["context"],
            about["batch"],
            check.device,
        )
        row = attempt({**about, "model": subject.label}, lambda work=work: work().result())
        yield row
        if "step_ms" not in row:
            pool.shutdown()
            pool = workers()
    pool.shutdown()


@torch.no_grad()
def _graph(subject: Subject, dtype: str, context: int, batch: int, device: torch.device) -> Row:
    model = make_model(
        subject, AutoConfig.for_model(**subject.config), getattr(torch, dtype), device
    )
    stored = filled_cache(model, "static", context, batch)
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)

    def step() -> None:
        # The cache counts its tokens on the device: replays, without this, would soon write beyond
        # its end.
        for layer in stored.layers:
            layer.cumulative_length.fill_(context)
        model(token, past_key_values=stored, use_cache=True)

    try:
        spent = graph_seconds(step, device, 0.4)
    except (
        Exception
    ) as error:  # stock code that waits for the device cannot be captured: that is the result
        return {"not_captured": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"step_ms": 1e3 * spent, "decode_tokens_per_s": batch / spent}


def _capacity(asked: BenchRequest, check: Check) -> Iterator[Row]:
    """The most tokens of cache beside all layers' weights, by the same formula that keeps runs
    within memory.
    """
    free = free_memory(check.device)
    size = getattr(torch, str(asked.dtype)).itemsize
    for subject in subjects(replace(asked, layers=None)):
        weights = count_parameters(AutoConfig.for_model(**subject.config))
        none, some = (
            step_costs(subject, weights, size, tokens, 1).memory for tokens in (0, 1 << 20)
        )
        tokens = None if free is None else max(0, int((free - none) / (some - none) * (1 << 20)))
        depth = subject.config["num_hidden_layers"]
        yield {"shape": asked.shape, "layers": depth, "model": subject.label, "fits_tokens": tokens}
