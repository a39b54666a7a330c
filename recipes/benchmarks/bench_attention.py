"""The speed of attention on this machine, against the naive formula and against the machine's
roofline.

    python recipes/benchmarks/bench_attention.py --json recipes/results/attention_cpu.json

Three tables: prefill against the naive formula (float32, causal); one decoding step at 8k context
for MHA, GQA-8, MQA and MLA 512 + 64 (as ``latent_attention`` computes it, and by
``attend_to_latents`` over the same cache), with the bytes it must read and the operations it must
do next to the time; and the peak memory of one call by length. Rounds go through all candidates in
turn, so that a busy moment meets all of them; the fastest counts.
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from measured import conditions
from shapes import run_in_child
from torch import Tensor
from torch.utils.benchmark import Timer

from kvfold.attention import grouped_attention, latent_attention
from kvfold.attention.latent import attend_to_latents
from kvfold.convert.formatting import format_table
from kvfold.convert.measure.bench import read_peak_memory

BATCH = 8
HEADS = 32
DIM = 128
CONTEXT = 8192
RANK = 512
ROPE = 64
NOPE = 128
VALUE = 128
Name = TypeVar("Name")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Step:
    """One decoding step: what it reads and does, and the call."""

    name: str
    read: int  # bytes
    operations: int
    call: Callable[[], Tensor]


def naive_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula in four steps: all scores, a mask, a softmax, a product."""
    length = query.shape[2]
    scores = query @ key.mT / query.shape[-1] ** 0.5
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    z: Tensor = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
    return z


def fastest(calls: dict[Name, Callable[[], Any]], threads: int, rounds: int) -> dict[Name, float]:
    """Seconds of each call's fastest run, the calls taking turns; short calls run several times a
    turn.
    """
    timers = {
        name: Timer("call()", globals={"call": call}, num_threads=threads)
        for name, call in calls.items()
    }
    first = {name: timer.timeit(1).mean for name, timer in timers.items()}
    repeats = {name: 1 + min(9, int(0.2 / seconds)) for name, seconds in first.items()}
    times: dict[Name, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name] += [timer.timeit(1).mean for _ in range(repeats[name])]
    return {name: min(found) for name, found in times.items()}


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def prefill(length: int, threads: int, rounds: int) -> dict[str, Any]:
    query, key, value = (random(1, HEADS, length, DIM, dtype=torch.float32) for _ in range(3))
    calls = {
        "naive": lambda: naive_attention(query, key, value),
        "kvfold": lambda: grouped_attention(query, key, value),
    }
    seconds = fastest(calls, threads, rounds)
    shown = {f"{name}_ms": round(1e3 * time, 2) for name, time in seconds.items()}
    return {"T": length, **shown, "ratio": round(seconds["naive"] / seconds["kvfold"], 2)}


def grouped_step(name: str, kv_heads: int, dtype: torch.dtype) -> Step:
    query = random(BATCH, HEADS, 1, DIM, dtype=dtype)
    key, value = (random(BATCH, kv_heads, CONTEXT, DIM, dtype=dtype) for _ in range(2))
    read = key.nbytes + value.nbytes
    return Step(
        name, read, 4 * BATCH * HEADS * CONTEXT * DIM, lambda: grouped_attention(query, key, value)
    )


def latent_step(form: str, dtype: torch.dtype) -> Step:
    """MLA 512 + 64: ``form`` is explicit, absorbed (as ``latent_attention`` computes it) or
    attend_to_latents.
    """
    nope = random(BATCH, HEADS, 1, NOPE, dtype=dtype)
    rope = random(BATCH, HEADS, 1, ROPE, dtype=dtype)
    latent = random(BATCH, CONTEXT, RANK + ROPE, dtype=dtype)
    up_key, up_value = (
        random(HEADS, width, RANK, dtype=dtype) / RANK**0.5 for width in (NOPE, VALUE)
    )
    read = latent.nbytes + up_key.nbytes + up_value.nbytes
    slots = BATCH * HEADS * CONTEXT
    if form != "explicit":
        operations = 2 * slots * (2 * RANK + ROPE) + 2 * BATCH * HEADS * RANK * (NOPE + VALUE)
    else:
        operations = 2 * slots * (RANK * (NOPE + VALUE) + NOPE + ROPE + VALUE)

    def attend() -> Tensor:
        return latent_attention(nope, rope, latent, up_key, up_value, absorbed=form == "absorbed")

    def by_decode() -> Tensor:
        query = torch.einsum("bhtd,hdr->bhtr", nope, up_key)
        z = attend_to_latents(
            query, rope, latent[..., :RANK], latent[..., RANK:], (NOPE + ROPE) ** -0.5
        )
        return torch.einsum("bhtr,hdr->bhtd", z, up_value)

    return Step(
        f"MLA 512+64 {form}", read, operations, by_decode if form == "latent_decode" else attend
    )


def roofline(dtype: torch.dtype, threads: int) -> dict[str, float]:
    """The roofline of the machine: bytes/s of a plain read (a sum), operations/s of a large matrix
    product.
    """
    memory = torch.ones(2**28, dtype=torch.float32)
    matrix = random(2048, 2048, dtype=dtype)
    seconds = fastest({"read": memory.sum, "multiply": lambda: matrix @ matrix}, threads, 6)
    return {"read": memory.nbytes / seconds["read"], "multiply": 2 * 2048**3 / seconds["multiply"]}


def decode(threads: int, rounds: int, explicit: bool) -> list[dict[str, Any]]:
    """One step of every variant and dtype, all taking turns; explicit MLA, which takes seconds,
    alone.
    """
    names = ("float32", "bfloat16")
    roofs = {name: roofline(DTYPES[name], threads) for name in names}
    steps = {(step.name, name): step for name in names for step in variants(DTYPES[name])}
    seconds = fastest({key: step.call for key, step in steps.items()}, threads, rounds)
    if explicit:
        step = latent_step("explicit", torch.float32)
        steps[step.name, "float32"] = step
        seconds |= fastest({(step.name, "float32"): step.call}, threads, 1)
    return [
        decode_row(step, dtype, seconds[variant, dtype], seconds["MHA", dtype], roofs[dtype])
        for (variant, dtype), step in steps.items()
    ]


def variants(dtype: torch.dtype) -> list[Step]:
    grouped = [grouped_step(*each, dtype) for each in (("MHA", HEADS), ("GQA-8", 8), ("MQA", 1))]
    return [*grouped, *(latent_step(form, dtype) for form in ("absorbed", "latent_decode"))]


def decode_row(
    step: Step, dtype: str, time: float, mha: float, roof: dict[str, float]
) -> dict[str, Any]:
    """A variant's time, its ratio to MHA, and how near it comes to the roofline."""
    floor = {"read": step.read / roof["read"], "multiply": step.operations / roof["multiply"]}
    return {
        "variant": step.name,
        "dtype": dtype,
        "ms": round(1e3 * time, 2),
        "faster_than_mha": round(mha / time, 2),
        "read_mb": round(step.read / 1e6, 1),
        "gflop": round(step.operations / 1e9, 2),
        "plain_read_ms": round(1e3 * floor["read"], 2),
        "plain_multiply_ms": round(1e3 * floor["multiply"], 2),
        "of_plain_read": round(floor["read"] / time, 3),
        "of_roofline": round(max(floor.values()) / time, 3),
    }


PEAK_CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "causal, second half on a cached first": {"half": True},
    "window 1024": {"window": 1024},
    "left padding": {"starts": 100},
    "bfloat16": {"dtype": torch.bfloat16},
    "left padding, with gradients": {"starts": 100, "backward": True},
}


def peak_of(case: str, length: int) -> int:
    """Bytes that one call needs beyond its inputs, 4 heads x 64; meant for its own process."""
    options = dict(PEAK_CASES[case])
    dtype, half, backward = (options.pop(name, None) for name in ("dtype", "half", "backward"))
    if "starts" in options:
        options["starts"] = torch.tensor([options["starts"]])
    query, key, value = (
        torch.randn(1, 4, length, 64, dtype=dtype or torch.float32) for _ in range(3)
    )
    query = query[:, :, length // 2 :] if half else query
    grouped_attention(
        query[..., :64, :], key[..., :64, :], value[..., :64, :], window=8
    )  # what torch loads on first use
    before = read_peak_memory(torch.device("cpu"))
    z = grouped_attention(query.requires_grad_(bool(backward)), key, value, **options)
    if backward:
        z.sum().backward()
    return read_peak_memory(torch.device("cpu")) - before


def peaks(lengths: list[int]) -> list[dict[str, Any]]:
    rows = []
    for case in PEAK_CASES:
        row: dict[str, Any] = {"case": case}
        for length in lengths:
            peak, _ = run_in_child(__file__, ["--peak", case, str(length)])
            row[f"T={length}_mb"] = round(peak / 1e6, 1)
        rows.append(row)
    return rows


def ratios(report: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """The promises on a CPU: name -> (measured, at least)."""
    steps = {(row["variant"], row["dtype"]): row for row in report["decode"]}
    measured = {
        f"prefill T={row['T']} against naive": (row["ratio"], 2.0)
        for row in report["prefill"]
        if row["T"] >= 2048
    }
    for variant, least in (("GQA-8", 2.5), ("MQA", 6.0), ("MLA 512+64 absorbed", 1.7)):
        measured[f"{variant} against MHA, float32"] = (
            steps[variant, "float32"]["faster_than_mha"],
            least,
        )
    explicit = steps.get(("MLA 512+64 explicit", "float32"))
    if explicit:
        ratio = explicit["ms"] / steps["MLA 512+64 absorbed", "float32"]["ms"]
        measured["MLA absorbed against explicit"] = (round(ratio, 1), 50.0)
    for variant in ("MHA", "GQA-8", "MQA"):
        ratio = steps[variant, "float32"]["ms"] / steps[variant, "bfloat16"]["ms"]
        measured[f"{variant} bfloat16 against float32"] = (round(ratio, 2), 1.0)
    return measured


def table(rows: list[dict[str, Any]]) -> str:
    return "\n".join(
        format_table([list(rows[0]), *(tuple(map(str, row.values())) for row in rows)])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--skip-explicit",
        action="store_true",
        help="leave out explicit MLA, which takes seconds a step",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 when a ratio is below what is promised"
    )
    parser.add_argument("--peak", nargs=2, metavar=("CASE", "T"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.peak:
        print(peak_of(chosen.peak[0], int(chosen.peak[1])))
        return
    torch.manual_seed(0)
    common = (chosen.threads, chosen.rounds)
    report: dict[str, Any] = {**conditions(), "threads": chosen.threads}
    report["prefill"] = [prefill(length, *common) for length in (512, 2048)]
    report["decode"] = decode(*common, not chosen.skip_explicit)
    report["peak_memory"] = peaks([4096, 8192, 16384])
    report["ratios"] = {
        name: {"measured": got, "at_least": least} for name, (got, least) in ratios(report).items()
    }
    for name in ("prefill", "decode", "peak_memory"):
        print(f"\n{name}\n{table(report[name])}")
    print("\nratios")
    for name, (got, least) in ratios(report).items():
        print(f"  {name}: {got} (at least {least}) {'' if got >= least else '<-- below'}")
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")
    if chosen.check and any(got < least for got, least in ratios(report).values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
