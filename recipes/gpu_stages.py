"""The stages of gpu_check.py: generators of rows, the most useful row first."""

import statistics
import subprocess
import sys
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, SMALL, make_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, StaticCache

from kvfold.attention import absorb
from kvfold.attention.kernel import run_latent_kernel
from kvfold.convert import (
    ConvertRequest,
    UptrainRequest,
    convert_checkpoint,
    demo_folder,
    drift_checkpoints,
    uptrain_checkpoint,
)
from kvfold.convert.data import read_text
from kvfold.convert.request import DriftRequest

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
WIDE = ("llama-2-7b", "llama-3-8b")
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
}
COPY_SHARE = 0.85  # asked of the kernel at 8k tokens of context and more
LARGEST_KL_DIFFERENCE = 1e-4  # nats between a card and a CPU, both in float32
LARGEST_ERROR_RATIO = 2  # of the kernel, relative to the plain formula in the same dtype


@dataclass(frozen=True)
class Run:
    """What every stage gets.

    device: the card, or the CPU of a rehearsal.
    rehearse: whether sizes are tiny.
    model: the checkpoint to convert; None for the one that ships.
    text: the calibration text; None for the one that ships.
    work: a folder for checkpoints.
    end: when the stage is stopped, on the clock of time.monotonic.
    """

    device: torch.device
    rehearse: bool
    model: Path | None
    text: Path | None
    work: Path
    end: float

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    @property
    def source(self) -> str:
        return str(self.model or demo_folder())

    @property
    def split(self) -> dict[str, Any]:
        """Half of the cache of SmolLM2-135M, or a sixteenth of that of the model that ships."""
        rank, rope = (24, 8) if self.model is None else (128, 64)
        return {"to": "mla", "kv_rank": rank, "rope_dim": rope}

    def convert(self, name: str, **options: Any) -> Row:
        """Convert a model into ``work/name``; returns seconds, peak memory and the loss."""
        samples, length = (4, 32) if self.rehearse else (64, 256)
        settings = {"model": self.source, "samples": samples, "seq_len": length, **options}
        if settings.get("method") == "svd" and not settings.get("polish"):
            del settings["samples"], settings["seq_len"]
        elif self.text is not None:
            settings["calibration"] = str(self.text)
        start_memory(self.device)
        began = time.monotonic()
        result = convert_checkpoint(
            ConvertRequest(
                out=str(self.work / name),
                device=self.device.type,
                overwrite=True,
                quiet=True,
                **settings,
            )
        )
        row = {"seconds": time.monotonic() - began, **peak_memory(self.device)}
        if result.drift is not None:
            row |= {"kl": result.drift.kl, "excess": result.drift.excess}
        return row


def measure(about: Row, function: Callable[..., Row], *arguments: Any) -> Row:
    """``about`` with what ``function`` returns, or with its error: the next size still runs."""
    try:
        return {**about, **function(*arguments)}
    except Exception:
        torch.cuda.empty_cache()
        return {**about, "failed": traceback.format_exc()[-2000:]}


def start_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> Row:
    return {"peak_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}


def median_seconds(call: Callable[[], Any], device: torch.device, repeats: int = 20) -> float:
    """Median seconds of ``call``; on a card it is replayed from a CUDA graph, without launches."""
    call()
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1000)
    return statistics.median(times)


def tests(run: Run) -> Iterator[Row]:
    """The tests marked gpu, in one process."""
    report = run.work / "tests.xml"
    command = [sys.executable, "-P", "-m", "pytest", "-q", f"--junitxml={report}"]
    selection = ["tests/attention/test_latent_decode.py"] if run.rehearse else ["-m", "gpu"]
    output = subprocess.run(
        [*command, *selection], cwd=ROOT, capture_output=True, text=True, timeout=run.left
    )
    failures = []
    count = 0
    for case in ElementTree.parse(report).iter("testcase"):
        count += 1
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(case.get("name"))
    right = output.returncode == 0
    yield {"tests": count, "failures": failures, "right": right, "end": output.stdout[-1500:]}


def kernel(run: Run) -> Iterator[Row]:
    """Decoding over latents of 512 + 64: bytes of cache per second, and the error."""
    copy = copy_rate(run)
    yield {"copy_gb_per_s": copy / 1e9}
    sizes = [(heads, 16, 8192) for heads in (32, 128)] + [(heads, 16, 32768) for heads in (32, 128)]
    sizes += [(16, 16, 8192), (64, 16, 8192), (32, 1, 8192), (32, 64, 8192), (32, 16, 2048)]
    if run.rehearse:
        sizes = [(4, 2, 64)]
    for heads, batch, context in sizes:
        about = {"heads": heads, "batch": batch, "context": context}
        yield measure(about, measure_kernel, run, heads, batch, context, copy)


def copy_rate(run: Run) -> float:
    """Bytes per second, read and written, of a copy of 2 GiB."""
    size = 1 << (20 if run.rehearse else 31)
    source = torch.empty(size, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), run.device)


def measure_kernel(run: Run, heads: int, batch: int, context: int, copy: float) -> Row:
    # Triton's interpreter truncates where a card rounds to bfloat16.
    dtype = torch.float16 if run.rehearse else torch.bfloat16
    rank, rope = (32, 16) if run.rehearse else (512, 64)
    stored = torch.randn(batch, context, rank + rope, device=run.device, dtype=dtype)
    queries = torch.randn(batch, heads, 1, rank + rope, device=run.device, dtype=dtype)
    inputs = [queries[..., :rank], queries[..., rank:], stored[..., :rank], stored[..., rank:]]
    scale = (128 + rope) ** -0.5
    spent = median_seconds(lambda: run_latent_kernel(*inputs, scale), run.device)
    row: Row = {"us": 1e6 * spent, "gb_per_s": stored.nbytes / spent / 1e9}
    row["of_copy"] = stored.nbytes / spent / copy
    if context >= 8192 and batch >= 16:
        row["reached"] = row["of_copy"] >= COPY_SHARE
    exact = attend(*(x[:1].double() for x in inputs), scale)
    error = (run_latent_kernel(*(x[:1] for x in inputs), scale) - exact).norm()
    plain = (attend(*(x[:1] for x in inputs), scale) - exact).norm()
    row["error_ratio"] = float(error / plain)
    row["right"] = row["error_ratio"] <= LARGEST_ERROR_RATIO
    if 2 * batch * heads * context * 320 < 8e9:
        keys = torch.randn(batch, heads, context, 192, device=run.device, dtype=dtype)
        values = torch.randn(batch, heads, context, 128, device=run.device, dtype=dtype)
        last = keys[:, :, -1:]
        expanded = median_seconds(
            lambda: scaled_dot_product_attention(last, keys, values), run.device
        )
        row["sdpa_expanded_us"] = 1e6 * expanded
    if find_spec("flashinfer") is not None:
        row["flashinfer_us"] = 1e6 * median_seconds(flashinfer_call(inputs, scale), run.device)
    return row


def attend(query: Tensor, rope: Tensor, latent: Tensor, key: Tensor, scale: float) -> Tensor:
    """The formula of `run_latent_kernel`."""
    scores = scale * (query @ latent[:, None].mT + rope @ key[:, None].mT)
    return scores.softmax(-1) @ latent[:, None]


def flashinfer_call(inputs: list[Tensor], scale: float) -> Callable[[], Any]:
    """The same decoding step by FlashInfer, over pages of 64 tokens."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    query, rope, latent, key = inputs
    batch, context, rank = latent.shape
    pages = batch * context // 64
    workspace = torch.empty(1 << 27, dtype=torch.int8, device=query.device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    table = torch.arange(pages, dtype=torch.int32, device=query.device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=query.device)
    indices = starts * (context // 64)
    sizes = (query.shape[1], rank, rope.shape[-1], 64)
    wrapper.plan(starts, indices, table, lengths, *sizes, False, scale, query.dtype, latent.dtype)
    latents = latent.reshape(pages, 64, rank).contiguous()
    keys = key.reshape(pages, 64, -1).contiguous()
    return lambda: wrapper.run(query[:, :, 0], rope[:, :, 0], latents, keys)


def make_shape(run: Run, name: str) -> Path:
    """A folder with a llama of two layers in random weights, with the attention of ``name``; MLPs
    are equally wide, so that steps differ by their attention.
    """
    sizes = {"intermediate_size": 11008, "vocab_size": SMALL} | (TINY if run.rehearse else {})
    return make_model(run.work / name, SHAPES[name], **sizes)


def decode(run: Run) -> Iterator[Row]:
    """A decoding step of Llama-3-8B's shape: as GQA-8, as MHA, and as absorbed MLA 512 + 64."""
    batch, context = (2, 32) if run.rehearse else (16, 8192)
    rank, rope = (16, 8) if run.rehearse else (512, 64)
    source = make_shape(run, "llama-3-8b")
    run.convert("latent", model=str(source), to="mla", kv_rank=rank, rope_dim=rope, method="svd")
    whole = make_shape(run, "llama-2-7b")
    for label, folder in (("GQA-8", source), ("MLA", run.work / "latent"), ("MHA", whole)):
        about = {"model": label, "layers": 2, "batch": batch, "context": context}
        yield measure(about, measure_step, run, folder, batch, context)


@torch.no_grad()
def measure_step(run: Run, folder: Path, batch: int, context: int) -> Row:
    dtype = torch.float32 if run.rehearse else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(run.device).eval()
    if model.config.model_type != "llama":
        absorb(model)
    cache = StaticCache(config=model.config, max_cache_len=context)
    tokens = torch.zeros(batch, 1, dtype=torch.long, device=run.device)
    model(tokens, past_key_values=cache)

    def step() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context - 1)
        model(tokens, past_key_values=cache)

    start_memory(run.device)
    seconds = median_seconds(step, run.device)
    return {"step_ms": 1e3 * seconds, "tokens_per_s": batch / seconds, **peak_memory(run.device)}


def convert(run: Run) -> Iterator[Row]:
    """Fits at the widths of 7B and 8B, two layers each, then of a whole model."""
    rank, rope = (16, 8) if run.rehearse else (512, 64)
    for name in WIDE:
        folder = make_shape(run, name)
        for layout in ("free", "engine"):
            options = {"to": "mla", "kv_rank": rank, "rope_dim": rope, "layout": layout}
            about = {"shape": name, "layers": 2, **options}
            yield measure(about, convert_with, run, {"model": str(folder), **options})
        about = {"shape": name, "layers": 2, "to": "mqa"}
        yield measure(about, convert_with, run, {"model": str(folder), "to": "mqa"})
    about = {"model": "the model given" if run.model else "the model that ships", **run.split}
    yield measure(about, convert_with, run, run.split)


def convert_with(run: Run, options: Row) -> Row:
    return run.convert("converted", **options)


def train(run: Run) -> Iterator[Row]:
    """Polishing: tokens per second from two lengths of it, then the loss by tokens."""
    step = 4 * (32 if run.rehearse else 256)
    short, long = (1, 2) if run.rehearse else (10, 60)
    rows = {}
    for steps in (short, long):
        options = {**run.split, "method": "svd", "polish": str(steps), "repeat_text": True}
        rows[steps] = measure({"polish_steps": steps}, convert_with, run, options)
        yield rows[steps]
    if all("seconds" in row for row in rows.values()):
        seconds = (rows[long]["seconds"] - rows[short]["seconds"]) / (long - short)
        yield {"step_seconds": seconds, "tokens_per_s": step / seconds if seconds > 0 else None}
    if not run.rehearse:
        for tokens in ("200k", "400k"):
            options = {**run.split, "refine": 50, "polish": tokens, "repeat_text": True}
            yield measure({"refine": 50, "polish": tokens}, convert_with, run, options)


def drift(run: Run) -> Iterator[Row]:
    """Drift on the device in float32 and bfloat16, against the CPU's."""
    run.convert("student", method="svd", **run.split)
    samples, length = (2, 32) if run.rehearse else (16, 256)
    reference = None
    for device, dtype in (("cpu", "float32"), (None, "float32"), (None, "bfloat16")):
        request = DriftRequest(
            run.source,
            str(run.work / "student"),
            device=device or run.device.type,
            dtype=dtype,
            samples=samples,
            seq_len=length,
            quiet=True,
        )
        report = drift_checkpoints(request)
        reference = report.kl if reference is None else reference
        row = {"device": request.device, "dtype": dtype, "kl": report.kl, "excess": report.excess}
        row["kl_minus_cpu"] = report.kl - reference
        if dtype == "float32":
            row["right"] = abs(row["kl_minus_cpu"]) <= LARGEST_KL_DIFFERENCE
        yield row


def uptrain(run: Run) -> Iterator[Row]:
    """Tokens per second and memory of uptraining against the source."""
    run.convert("student", method="svd", **run.split)
    text = run.work / "text.txt"
    text.write_text(run.text.read_text() if run.text else read_text("train"))
    steps, batch, length = (2, 64, 32) if run.rehearse else (8, 65536, 1024)
    request = UptrainRequest(
        model=str(run.work / "student"),
        out=str(run.work / "trained"),
        teacher=run.source,
        text=str(text),
        steps=steps,
        batch_tokens=batch,
        seq_len=length,
        eval_every=0,
        device=run.device.type,
        overwrite=True,
        quiet=True,
    )
    start_memory(run.device)
    began = time.monotonic()
    uptrain_checkpoint(request)
    seconds = time.monotonic() - began
    yield {"tokens_per_s": steps * batch / seconds, "seconds": seconds, **peak_memory(run.device)}
