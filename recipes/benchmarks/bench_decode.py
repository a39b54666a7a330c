"""A whole decoding step of Llama-2-7B's shape: MHA in stock transformers against GQA-8 and MLA,
stock and absorbed.

    python recipes/benchmarks/bench_decode.py --json recipes/results/decode_cpu.json --check

Two layers, float32, batch 16, 8k context: about 17 GB of memory. For every kind the time of a step,
of its attention alone (no weights, no growing cache) and the roofline: what it must read at the
bandwidth measured here, and what it must compute at the rate of matrix products measured here. With
``--cache static`` the cache is preallocated; the default is the one that ``generate`` uses, which
is copied at every step.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measured import conditions

from kvfold.attention.latent import absorb_query, expand_value, latent_decode
from kvfold.convert.commands.bench_command import format_benchmark
from kvfold.convert.measure.bench import Subject, bench_checkpoints, list_subjects, step_costs
from kvfold.convert.measure.machine import Clock, repeat
from kvfold.convert.request import BenchRequest

AT_LEAST = 2.0  # GQA-8 and absorbed MLA against MHA


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    return min(repeat(Clock(device), call, 3.0))


def machine_rates(device: torch.device) -> dict[str, float]:
    """Bytes per second of reading memory, and operations per second of a float32 matrix product."""
    big = torch.ones(1 << 28, device=device)
    bandwidth = big.nbytes / seconds(lambda: big.sum(), device)
    side = 2048
    left, right = torch.randn(2, side, side, device=device)
    rate = 2 * side**3 / seconds(lambda: left @ right, device)
    return {"read_bytes_per_s": bandwidth, "operations_per_s": rate}


@torch.no_grad()
def attention_alone(subject: Subject, context: int, batch: int, device: torch.device) -> float:
    """Seconds of one layer's attention over a random cache, as the model's module calls it."""
    config = subject.config
    heads = config["num_attention_heads"]
    random = lambda *shape: torch.randn(shape, device=device)
    if config["model_type"] == "llama":
        dim = config["head_dim"]
        groups = config["num_key_value_heads"]
        query, key, value = (
            random(batch, heads, 1, dim),
            *(random(batch, groups, context, dim) for _ in range(2)),
        )
        attend = torch.nn.functional.scaled_dot_product_attention
        return seconds(lambda: attend(query, key, value, enable_gqa=groups != heads), device)
    rank = config["kv_lora_rank"]
    rope = config["qk_rope_head_dim"]
    nope = config["qk_nope_head_dim"]
    dim = config["v_head_dim"]
    query = random(batch, heads, 1, nope)
    turned = random(batch, heads, 1, rope)
    latent = random(batch, context, rank)
    key = random(batch, context, rope)
    up = random(heads, nope + dim, rank) * rank**-0.5
    if subject.form == "absorbed":

        def absorbed_step() -> torch.Tensor:
            lifted = absorb_query(query, up[:, :nope])
            return expand_value(latent_decode(lifted, turned, latent, key, 0.07), up[:, nope:])

        return seconds(absorbed_step, device)

    def stock_step() -> torch.Tensor:
        made = (latent @ up.flatten(0, 1).mT).view(batch, context, heads, -1).transpose(1, 2)
        keys = torch.cat([made[..., :nope], key[:, None].expand(-1, heads, -1, -1)], -1)
        whole = torch.cat([query, turned], -1)
        return torch.nn.functional.scaled_dot_product_attention(whole, keys, made[..., nope:])

    return min(repeat(Clock(device), stock_step, 1.0, warm=1, fewest=1))


def add_roofline(
    row: dict[str, Any], subject: Subject, rates: dict[str, float], layers: int, alone: float
) -> None:
    """Beside each figure: the time that reading and that computing takes at least, for the step and
    its attention.
    """
    only = step_costs(subject, (0, 0), 4, row["context"], row["batch"])
    row["attention_alone_ms"] = 1e3 * alone * layers
    for name, read, operations in (
        ("step", row["read_bytes"], row["operations"]),
        ("attention", only.cache_bytes, only.attention_operations),
    ):
        row[f"{name}_read_ms"] = 1e3 * read / rates["read_bytes_per_s"]
        row[f"{name}_compute_ms"] = 1e3 * operations / rates["operations_per_s"]


def roofline_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'':24}{'step':>9}{'read':>9}{'compute':>9}{'attention alone':>18}{'read':>9}{'compute':>9}"
        "   (ms)"
    ]
    for row in rows:
        step = "".join(f"{row[key]:9.0f}" for key in ("step_ms", "step_read_ms", "step_compute_ms"))
        inner = "".join(f"{row[key]:9.0f}" for key in ("attention_read_ms", "attention_compute_ms"))
        lines.append(f"{row['model']:24}{step}{row['attention_alone_ms']:18.0f}{inner}")
    return "\n".join(lines)


def failures(rows: list[dict[str, Any]]) -> list[str]:
    wrong = [
        f"{r['model']}: cache is not what the formula says"
        for r in rows
        if r["cache_bytes"] != r["cache_bytes_formula"]
    ]
    fast = [row for row in rows if row["model"].startswith("GQA") or row["form"] == "absorbed"]
    slow = [
        f"{row['model']}: {row['ratio']:.2f} x, expected {AT_LEAST}"
        for row in fast
        if row["ratio"] < AT_LEAST
    ]
    return wrong + slow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument("--prefill-tokens", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 when a ratio or a cache is not as promised",
    )
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    device = torch.device("cpu")
    request = BenchRequest(
        shape=chosen.shape, layers=chosen.layers, contexts=(chosen.context,), batches=(chosen.batch,), device="cpu",
        dtype="float32", cache=chosen.cache, prefill_tokens=chosen.prefill_tokens, threads=chosen.threads,
    )  # fmt: skip
    done = bench_checkpoints(request)
    if any(row.needed_bytes for row in done.rows):
        raise SystemExit(format_benchmark(done))
    report = done.to_dict() | conditions(device)
    report["rates"] = rates = machine_rates(device)
    for row, subject in zip(report["rows"], list_subjects(request), strict=True):
        alone = attention_alone(subject, chosen.context, chosen.batch, device)
        add_roofline(row, subject, rates, chosen.layers, alone)
    print(format_benchmark(done), "\n\n", roofline_table(report["rows"]), sep="")
    print(
        f"\nread {rates['read_bytes_per_s'] / 1e9:.1f} GB/s, matrices"
        f" {rates['operations_per_s'] / 1e9:.0f} GFLOP/s"
    )
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")
    if chosen.check and failures(report["rows"]):
        raise SystemExit("\n".join(failures(report["rows"])))


if __name__ == "__main__":
    main()
