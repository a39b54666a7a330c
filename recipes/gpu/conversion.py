"""Stages that convert and train: fits by part and layer, refinement and polishing, the loss by tokens, uptraining."""

import math
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import bench_syncs
import bench_training
import bench_walk
import torch
from gpu.card import Check, rates, seconds, timed
from measured import Row

from kvfold.attention.drift import recording
from kvfold.convert import UptrainRequest, uptrain_checkpoint
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.writer import ShardWriter
from kvfold.convert.conversion import latent, layers, polishing, student
from kvfold.convert.data import read_text
from kvfold.convert.measure.machine import peak_memory, reset_peak
from kvfold.convert.training.budget import step_tokens
from kvfold.convert.uptrain.trainer import Uptrainer
from kvfold.convert.walk.statistics import StatisticsAccumulator

# The functions whose time is that of a part; the rest is reading, walking and checking what was written.
PARTS = {
    (recording.OpenLayer, "__call__ attend"): "passes",
    (StatisticsAccumulator, "add result"): "statistics",
    (layers, "fitted_fold"): "fits",
    (latent, "fitted_latent"): "fits",
    (student, "refit_output"): "fits",
    (ShardWriter, "write_own sync finish"): "writing",
}
EIGHT = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
MOST_EXCESS = 0.005  # nats, of a conversion on the card over the same one on a CPU
MATMUL_SHARE = 0.4
REFINE_BATCH = 8  # sequences, as in `training.refine`


def convert(check: Check) -> Iterator[Row]:
    """Fitted conversions by part against the CPU's excess, synchronizations, and time per layer of larger shapes."""
    depth = int(open_checkpoint(str(check.model)).config["num_hidden_layers"])
    for options in (check.split, {"to": "mqa"}):
        excess = []
        for device in dict.fromkeys((check.device, torch.device("cpu"))):
            reset_peak(device)
            with timed(PARTS, device) as parts:
                done = check.convert("fitted", device=device.type, **options)
            assert done.drift is not None  # there is text
            excess.append(done.drift.excess)
            row = {**options, "device": device.type, "seconds": sum(parts.values()), "parts": parts}
            yield {**row, "peak_bytes": peak_memory(device), "excess": excess[-1], "kl": done.drift.kl}
        apart = excess[0] - excess[-1]
        yield {**options, "excess_minus_cpu": apart, "right": abs(apart) <= MOST_EXCESS}
        with bench_syncs.counted(check.device) as places:
            check.convert("counted", **options)
        yield {**options, "synchronizations_per_layer": bench_syncs.per_layer(places, depth)}
    shapes = (("tiny", TINY, 2, 4),) if check.rehearse else (("1B", bench_walk.ONE, 2, 32), ("8B", EIGHT, 4, 8))
    target = check.split if check.rehearse else {"to": "mla", "kv_rank": 512, "rope_dim": 64, "seq_len": 512}
    for name, shape, count, heads in shapes:
        folder = check.work / name
        bench_walk.make_checkpoint(folder, bench_walk.config_of(shape, count, heads, 512, False))
        marks: dict[str, list[float]] = {}
        began = time.perf_counter()
        note = lambda stage, *_, marks=marks: marks.setdefault(stage, []).append(time.perf_counter())  # noqa: E731
        check.convert(f"{name}-out", note, model=str(folder), **target)
        spent = time.perf_counter() - began
        # Two stages count layers: that which collects statistics, and that which fits.
        each = {stage: [b - a for a, b in pairwise(marks[stage])] for stage in ("survey", "convert")}
        per_layer = sum(map(sum, each.values())) / count
        yield {"shape": name, "layers": count, "seconds": spent, "per_layer": per_layer, "stages": each}


def train(check: Check) -> Iterator[Row]:
    """Refinement and polishing: tokens/s, share of the bfloat16 rate, memory; KL and excess by tokens of polishing."""
    splits = ((24, 8),) if check.rehearse else ((128, 64), (64, 64), (48, 48))
    steps, sample = 2 if check.rehearse else 50, check.sample
    reset_peak(check.device)
    with timed({(student, "refine_layer"): "refining"}, check.device) as parts:
        done = check.convert("refined", to="mla", kv_rank=splits[0][0], rope_dim=splits[0][1], refine=steps)
    depth = len(done.plan.layout.computed)
    tokens = depth * steps * min(REFINE_BATCH, sample["samples"]) * sample["seq_len"]
    rate = tokens / parts["refining"]
    share = rate * _refined_elements(check.work / "refined") * 4 / depth / rates(check.device, check.rehearse)[1]
    row = {"refining": tokens, "tokens_per_s": rate, "seconds_per_layer": parts["refining"] / depth, "of_bf16": share}
    yield {**row, "peak_bytes": peak_memory(check.device), **_aim(True, share)}
    for sequences, length in ((2, 32),) if check.rehearse else ((4, 256), (16, 512), (64, 512)):
        yield from _speeds(check, sequences, length)
    rate = 0.0
    for amount, (rank, rope) in product((1024,) if check.rehearse else (10**6, 3 * 10**6, 10**7, 3 * 10**7), splits):
        row: Row = {"polished": f"MLA {rank} + {rope}", "tokens": amount}
        # What is not begun is not lost: a run that is stopped leaves no figure.
        left = check.ends - time.monotonic()
        if rate * left < 2 * amount and rate:
            yield {**row, "skipped": f"{left:.0f} s are left"}
            continue
        wanted = {
            "polish": amount // step_tokens(sample["seq_len"]) or 1,
            "repeat_text": True,
        }
        with timed({(polishing, "polish"): "polishing"}, check.device) as parts:
            done = check.convert("polished", to="mla", kv_rank=rank, rope_dim=rope, **wanted)
        assert done.drift is not None  # there is text
        rate, record = amount / parts["polishing"], done.record["polish"]
        row |= {"tokens_per_s": rate, "kl_fitted": record["before"], "kept": record["kept"], "curve": record["curve"]}
        yield {**row, "kl": done.drift.kl, "excess": done.drift.excess}


def _refined_elements(converted: Path) -> int:
    """Elements of the matrices of all attention layers: two operations for each and token, and two for its gradient.

    The gradients of activations, scores and the source's own pass are left out, so that shares of a rate are too low.
    """
    stored = open_checkpoint(str(converted)).tensors.items()
    return sum(math.prod(info.shape) for name, info in stored if ".self_attn." in name and len(info.shape) == 2)


def _speeds(check: Check, sequences: int, length: int) -> Iterator[Row]:
    """A step of polishing, and a stock forward and backward pass of the same tokens with the same trained tensors."""
    out = check.work / "refined"
    tokens = bench_training.calibration(check.model, check.sample["calibration"], sequences, length)
    stock = partial(bench_training.stock_pass, out, tokens.to(check.device), True, check.device)
    polish = partial(bench_training.polishing_step, check.model, out, tokens, check.device)
    for name, make, heads in (("stock", stock, 1), ("polish", polish, 2)):
        reset_peak(check.device)
        time = seconds(make(), check.device, 1.0)
        rate = bench_training.operations(out, heads) * tokens.numel() / time
        share = rate / rates(check.device, check.rehearse)[1]
        row = {"step": name, "sequences": sequences, "length": length, "tokens_per_s": tokens.numel() / time}
        yield {**row, "of_bf16": share, "peak_bytes": peak_memory(check.device), **_aim(name == "polish", share)}


def _aim(judged: bool, share: float) -> Row:
    return {"aim": MATMUL_SHARE, "reached": share >= MATMUL_SHARE} if judged else {}


def uptrain(check: Check) -> Iterator[Row]:
    """Uptraining a converted checkpoint with its source as the teacher: tokens/s and peak memory."""
    check.convert("converted", **check.split)
    text = check.text or check.work / "text.txt"
    if check.text is None:
        text.write_text(read_text("train"))
    steps, batch, length, micro = (2, 64, 32, 2) if check.rehearse else (20, 65536, 1024, 16)
    for trained in ("attention",) if check.rehearse else ("attention", "all"):
        request = UptrainRequest(
            model=str(check.work / "converted"), out=str(check.work / "trained"), teacher=str(check.model),
            text=str(text), train=trained, steps=steps, batch_tokens=batch, seq_len=length, micro_batch=micro,
            eval_every=0, device=check.device.type, overwrite=True, quiet=True,
        )  # fmt: skip
        reset_peak(check.device)
        with timed({(Uptrainer, "run"): "training"}, check.device) as parts:
            uptrain_checkpoint(request)
        row = {"uptrained": trained, "tokens": steps * batch, "tokens_per_s": steps * batch / parts["training"]}
        yield {**row, "peak_bytes": peak_memory(check.device)}
