"""Stages that convert and train: fits by part and layer, refinement and polishing, the loss by
tokens, uptraining.
"""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import bench_syncs
import bench_training
import bench_walk
import torch
from gpu.card import Check, attempt, rates, seconds, timed
from measured import Row
from torch import Tensor

from kvfold.attention.drift import recording
from kvfold.convert import UptrainRequest, uptrain_checkpoint
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.writer import ShardWriter
from kvfold.convert.conversion import latent, layers, polishing, student
from kvfold.convert.data import demo_folder, read_text
from kvfold.convert.measure.machine import peak_memory, reset_peak
from kvfold.convert.training.budget import refining_batch, step_tokens
from kvfold.convert.uptrain.trainer import Uptrainer
from kvfold.convert.walk.statistics import StatisticsAccumulator

# The functions whose time is that of a part; the rest is reading, walking and checking what was
# written.
PARTS = {
    (recording.OpenLayer, "run"): "passes",
    (StatisticsAccumulator, "add result"): "statistics",
    (layers, "fitted_fold"): "fits",
    (latent, "fitted_latent"): "fits",
    (student, "refit_output"): "fits",
    (ShardWriter, "write_own sync finish"): "writing",
}
EIGHT = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "head_dim": 128,
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
MOST_EXCESS = 0.005  # nats, of a conversion on the card over the same one on a CPU
MATMUL_SHARE = 0.4
# Tokens of a run of polishing, and the share of the time left that it is planned to take.
AMOUNTS = [digit * 10**power for power in (5, 6, 7) for digit in (1, 2, 3, 5)]
SHARE = 0.8


def convert(check: Check) -> Iterator[Row]:
    """Fitted conversions by part against the CPU's excess, time per layer of larger shapes, and
    synchronizations.
    """
    mla = check.split
    mqa = {"to": "mqa"}
    yield from _compared(check, mla)
    shapes = (
        (("tiny", TINY, 2, 4),)
        if check.rehearse
        else (("1B", bench_walk.ONE, 2, 32), ("8B", EIGHT, 4, 8))
    )
    for name, shape, count, heads in shapes:
        config = bench_walk.config_of(shape, count, heads, 512, False)
        yield attempt({"shape": name, "layers": count}, partial(_by_layer, check, name, config))
    yield from _compared(check, mqa)
    for options in ({"to": "mla", "kv_rank": 24, "rope_dim": 8}, mqa):
        yield attempt(options, partial(_synchronizations, check, options))


def _compared(check: Check, options: Row) -> Iterator[Row]:
    rows = []
    for device in dict.fromkeys((check.device, torch.device("cpu"))):
        rows.append(
            attempt({**options, "device": device.type}, partial(_by_part, check, device, options))
        )
        yield rows[-1]
    if all("excess" in row for row in rows):
        apart = rows[0]["excess"] - rows[-1]["excess"]
        yield {**options, "excess_minus_cpu": apart, "right": abs(apart) <= MOST_EXCESS}


def _by_part(check: Check, device: torch.device, options: Row) -> Row:
    reset_peak(device)
    with timed(PARTS, device) as parts:
        done = check.convert("fitted", device=device.type, **options)
    assert done.drift is not None  # there is text
    row = {"seconds": sum(parts.values()), "parts": parts, "peak_bytes": peak_memory(device)}
    return {**row, "excess": done.drift.excess, "kl": done.drift.kl}


def _by_layer(check: Check, name: str, config: Row) -> Row:
    """A conversion of a model with random weights: seconds in all, by part, and of each layer."""
    target = (
        check.split
        if check.rehearse
        else {"to": "mla", "kv_rank": 512, "rope_dim": 64, "seq_len": 512}
    )
    bench_walk.make_checkpoint(check.work / name, config)
    marks: dict[str, list[float]] = {}

    def note(stage: str, *_: object) -> None:
        marks.setdefault(stage, []).append(time.perf_counter())

    reset_peak(check.device)
    with timed(PARTS, check.device) as parts:
        check.convert(f"{name}-out", note, model=str(check.work / name), **target)
    # Two stages count layers: that which collects statistics, and that which fits.
    each = {stage: [b - a for a, b in pairwise(marks[stage])] for stage in ("survey", "convert")}
    per_layer = sum(map(sum, each.values())) / config["num_hidden_layers"]
    row = {"seconds": sum(parts.values()), "parts": parts, "per_layer": per_layer, "stages": each}
    return {**row, "peak_bytes": peak_memory(check.device)}


def _synchronizations(check: Check, options: Row) -> Row:
    """Counted with the model that ships, whose fits take seconds: waits per layer do not depend on
    sizes.
    """
    depth = int(open_checkpoint(str(demo_folder())).config["num_hidden_layers"])
    with bench_syncs.counted(check.device) as places:
        check.convert("counted", model=str(demo_folder()), calibration=None, **options)
    return {"synchronizations_per_layer": bench_syncs.per_layer(places, depth)}


def train(check: Check) -> Iterator[Row]:
    """Refinement and polishing: tokens/s, share of the bfloat16 rate, memory; KL and excess by
    tokens of polishing.
    """
    sample = check.sample
    splits = check.splits
    # Steps take as long from any weights: those without fits are there within seconds.
    check.convert("start", to="mla", kv_rank=splits[0][0], rope_dim=splits[0][1], method="svd")
    a_step = step_tokens(sample["seq_len"]) // sample["seq_len"], sample["seq_len"]
    rate = 0.0
    for sequences, length in ((2, 32),) if check.rehearse else (a_step, (16, 512), (64, 512)):
        for name, make, heads in (("stock", _stock, 1), ("polish", _polish, 2)):
            row = {"step": name, "sequences": sequences, "length": length}
            row = attempt(row, partial(_speed, check, make, heads, sequences, length))
            yield row
            if name == "polish" and not rate:
                rate = row.get("tokens_per_s", 0.0)
    began = time.monotonic()
    yield attempt({}, partial(_refined, check))
    took = time.monotonic() - began
    for place, (rank, rope) in enumerate(splits):
        # A run that is stopped leaves no figure: each takes the largest amount that fits in its
        # share of what is left.
        left = check.left / (len(splits) - place) - took
        amount = max((each for each in AMOUNTS if rate and each / rate < SHARE * left), default=0)
        row = {"polished": f"MLA {rank} + {rope}", "tokens": 1024 if check.rehearse else amount}
        if row["tokens"]:
            yield attempt(row, partial(_polished, check, rank, rope, row["tokens"]))
        else:
            yield {**row, "skipped": f"{left:.0f} s are left for it, at {rate:.0f} tokens/s"}


def _refined(check: Check) -> Row:
    steps, sample, (rank, rope) = 2 if check.rehearse else 50, check.sample, check.splits[0]
    reset_peak(check.device)
    with timed({(student, "refine_layer"): "refining"}, check.device) as parts:
        done = check.convert("refined", to="mla", kv_rank=rank, rope_dim=rope, refine=steps)
    depth = len(done.plan.layout.computed)
    batch = min(refining_batch(sample["seq_len"]), sample["samples"])
    tokens = depth * steps * batch * sample["seq_len"]
    rate = tokens / parts["refining"]
    share = (
        rate
        * _refined_elements(check.work / "refined")
        * 4
        / depth
        / rates(check.device, check.rehearse)[1]
    )
    row = {
        "refining": tokens,
        "tokens_per_s": rate,
        "seconds_per_layer": parts["refining"] / depth,
        "of_bf16": share,
    }
    return {**row, "peak_bytes": peak_memory(check.device), **_aim(True, share)}


def _refined_elements(converted: Path) -> int:
    """Elements of the matrices of all attention layers: two operations for each and token, and two
    for its gradient.

    The gradients of activations, scores and the source's own pass are left out, so that shares of a
    rate are too low.
    """
    stored = open_checkpoint(str(converted)).tensors.items()
    return sum(
        math.prod(info.shape)
        for name, info in stored
        if ".self_attn." in name and len(info.shape) == 2
    )


def _stock(check: Check, out: Path, tokens: Tensor) -> Callable[[], None]:
    return bench_training.stock_pass(out, tokens.to(check.device), True, check.device)


def _polish(check: Check, out: Path, tokens: Tensor) -> Callable[[], None]:
    return bench_training.polishing_step(check.model, out, tokens, check.device)


def _speed(
    check: Check, make: Callable[..., Callable[[], None]], heads: int, sequences: int, length: int
) -> Row:
    """A step of polishing, or a stock forward and backward pass of the same tokens with the same
    trained tensors.
    """
    out = check.work / "start"
    tokens = bench_training.calibration(check.model, check.sample["calibration"], sequences, length)
    reset_peak(check.device)
    spent = seconds(make(check, out, tokens), check.device, 1.0)
    rate = bench_training.operations(out, heads) * tokens.numel() / spent
    share = rate / rates(check.device, check.rehearse)[1]
    row = {
        "tokens_per_s": tokens.numel() / spent,
        "of_bf16": share,
        "peak_bytes": peak_memory(check.device),
    }
    return {**row, **_aim(make is _polish, share)}


def _polished(check: Check, rank: int, rope: int, tokens: int) -> Row:
    """A fitted conversion that is polished on ``tokens``; the curve has its figures at 0.2, 0.5, 1,
    2 ... million.
    """
    steps = max(1, tokens // step_tokens(check.sample["seq_len"]))
    reset_peak(check.device)
    with timed({(polishing, "polish"): "polishing"}, check.device) as parts:
        done = check.convert(
            "polished", to="mla", kv_rank=rank, rope_dim=rope, polish=steps, repeat_text=True
        )
    assert done.drift is not None  # there is text
    record = done.record["polish"]
    row = {
        "tokens_per_s": tokens / parts["polishing"],
        "seconds": sum(parts.values()),
        "kept": record["kept"],
    }
    row |= {
        "peak_bytes": peak_memory(check.device),
        "kl_fitted": record["before"],
        "kl": done.drift.kl,
    }
    return {**row, "excess": done.drift.excess, "curve": record["curve"]}


def _aim(judged: bool, share: float) -> Row:
    return {"aim": MATMUL_SHARE, "reached": share >= MATMUL_SHARE} if judged else {}


def uptrain(check: Check) -> Iterator[Row]:
    """Uptraining a converted checkpoint with its source as the teacher: tokens/s and peak memory."""
    check.convert("converted", method="svd", **check.split)
    if check.text is None:
        (check.work / "text.txt").write_text(read_text("train"))
    for trained in ("attention",) if check.rehearse else ("attention", "all"):
        yield attempt({"uptrained": trained}, partial(_uptrained, check, trained))


def _uptrained(check: Check, trained: str) -> Row:
    steps, batch, length, micro = (2, 64, 32, 2) if check.rehearse else (12, 65536, 1024, 16)
    request = UptrainRequest(
        model=str(check.work / "converted"), out=str(check.work / "trained"), teacher=str(check.model),
        text=str(check.text or check.work / "text.txt"), train=trained, steps=steps, batch_tokens=batch,
        seq_len=length, micro_batch=micro, eval_every=0, device=check.device.type, overwrite=True, quiet=True,
    )  # fmt: skip
    reset_peak(check.device)
    with timed({(Uptrainer, "run"): "training"}, check.device) as parts:
        uptrain_checkpoint(request)
    row = {"tokens": steps * batch, "tokens_per_s": steps * batch / parts["training"]}
    return {**row, "peak_bytes": peak_memory(check.device)}
