"""The estimate of a conversion's time beside measured runs: random Llama models of several shapes, and the one that
ships for refinement, which has nothing to learn from random weights; one thread.

    python recipes/benchmarks/bench_costs.py --json recipes/results/costs.json
    python recipes/benchmarks/bench_costs.py --weights

Both are CPU seconds, which other work on the machine changes little. The rates are measured as `kvfold convert` does
before it prints its estimate; loading libraries is done before.

With --weights: CPU seconds and memory of conversions that read no text, by width, each in a process of its own.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.bench.machine import conditions
from kvfold.convert.conversion.calibration import source_stream
from kvfold.convert.conversion.costs import costs_of
from kvfold.convert.conversion.plan import make_plan, reading
from kvfold.convert.conversion.start import machine_rates
from kvfold.convert.data import demo_folder
from kvfold.convert.io.checkpoint import open_checkpoint

TEXT = {"samples": 16, "seq_len": 256}
SHIPPED: dict[str, int] = {}  # instead of a shape
RUNS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "GQA-2, similar heads": ({"width": 512, "heads": 8, "kv_heads": 8, "layers": 3}, {"to": "gqa", "kv_heads": 2}),
    "MLA 128 + 64": (
        {"width": 768, "heads": 12, "kv_heads": 4, "layers": 2},
        {"to": "mla", "kv_rank": 128, "rope_dim": 64},
    ),
    "MLA 40 + 24, 50 steps of refinement": (SHIPPED, {"to": "mla", "kv_rank": 40, "rope_dim": 24, "refine": 50}),
    "MQA, 50 steps of polishing": (
        {"width": 384, "heads": 6, "kv_heads": 6, "layers": 4},
        {"to": "mqa", "polish": 50},
    ),
    "MLA, a budget of 128": (
        {"width": 384, "heads": 6, "kv_heads": 6, "layers": 2},
        {"to": "mla", "budget": 128},
    ),
}

# Without text: (width, layers) -> methods; the layers are those of a model whose bytes hardly count
WEIGHTS = {
    (256, 2): ("mean", "svd"),
    (1024, 2): ("mean", "svd", "svd, q"),
    (2048, 2): ("mean", "svd"),
    (4096, 1): ("mean",),
}
ALONE = """
import json, sys, time
from kvfold.convert import ConvertRequest, convert_checkpoint
convert_checkpoint(ConvertRequest(**json.loads(sys.argv[1])))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({"cpu_seconds": time.process_time(), "peak_bytes": 1024 * int(status["VmHWM"].split()[0])}))
"""


def make_model(
    folder: Path, width: int, heads: int, kv_heads: int, layers: int, dtype: torch.dtype = torch.float32
) -> Path:
    """A random model with the tokenizer that ships."""
    torch.manual_seed(0)
    vocabulary = json.loads((demo_folder() / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    for path in demo_folder().glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def estimate(request: ConvertRequest) -> dict[str, float]:
    """CPU seconds by what they are for."""
    checkpoint = open_checkpoint(request.model, reading(request))
    plan = make_plan(request, checkpoint)
    tokens = torch.randint(0, plan.geometry.vocabulary, (request.samples, request.seq_len))
    source = source_stream(plan)
    machine_rates(plan, source, tokens)  # the first products of a process are slow
    return costs_of(plan).seconds(machine_rates(plan, source, tokens, time.process_time))


def run(shape: dict[str, int], options: dict[str, Any], work: Path) -> dict[str, Any]:
    model = make_model(work / "model", **shape) if shape else demo_folder()
    request = ConvertRequest(model=str(model), out=str(work / "out"), quiet=True, **TEXT, **options)
    parts = estimate(request)
    started = time.process_time()
    convert_checkpoint(request)
    measured = time.process_time() - started
    return {"measured": measured, "estimate": sum(parts.values()), "parts": parts}


def weights_only(width: int, layers: int, method: str, work: Path) -> dict[str, Any]:
    """CPU seconds, imports included, and the peak of the memory of a process that converts without text."""
    heads = width // 64
    model = make_model(work / "model", width, heads, heads, layers, torch.bfloat16)
    target: dict[str, Any] = {"to": "gqa", "kv_heads": heads // 4}
    if method != "mean":
        target = {"to": "mla", "kv_rank": width // 4, "rope_dim": 64, "q_rank": width // 2 if "q" in method else None}
    request = {
        "model": str(model),
        "out": str(work / "out"),
        "method": method.partition(",")[0],
        "quiet": True,
        **target,
    }
    plan = make_plan(ConvertRequest(**request), checkpoint := open_checkpoint(model))
    checkpoint.close()
    line, one = [sys.executable, "-c", ALONE, json.dumps(request)], {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(line, capture_output=True, text=True, check=True, env=one)
    return {**json.loads(ran.stdout), "estimated_bytes": costs_of(plan).memory}


def weights_rows() -> dict[str, Any]:
    rows = {}
    for (width, layers), methods in WEIGHTS.items():
        for method in methods:
            with tempfile.TemporaryDirectory() as folder:
                row = rows[f"{method}, width {width}, {layers} layers"] = weights_only(
                    width, layers, method, Path(folder)
                )
            peak, estimate = (row[name] / 1e6 for name in ("peak_bytes", "estimated_bytes"))
            print(
                f"{method}, width {width}: {row['cpu_seconds']:.1f} s of CPU, {peak:.0f} MB (estimate {estimate:.0f})",
                flush=True,
            )
    return rows


def timed_rows() -> dict[str, Any]:
    rows = {}
    for name, (shape, options) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = run(shape, options, Path(folder))
        ratio = rows[name]["estimate"] / rows[name]["measured"]
        print(f"{name}: measured {rows[name]['measured']:.1f} s, estimate {rows[name]['estimate']:.1f} s ({ratio:.2f})")
        print("  " + ", ".join(f"{part} {value:.2f}" for part, value in rows[name]["parts"].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--weights", action="store_true", help="conversions that read no text, in their place")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = weights_rows() if arguments.weights else timed_rows()
    if arguments.json:
        arguments.json.write_text(json.dumps({"runs": rows, **conditions()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
