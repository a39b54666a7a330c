"""CPU seconds and peak memory of a conversion at the widths of 7B and 8B, by part.

    python recipes/benchmarks/bench_fit.py --work /scratch --json recipes/results/fit.json
    python recipes/benchmarks/bench_fit.py --work /scratch --only qwen2.5-7b --profile

Two layers of each shape in random weights, which say nothing about quality, with a vocabulary of
2048, on 8 x 256 tokens, in one thread and a process of its own, without the loss by position.
`forward` is the stock model's pass over the calibration tokens. `--against SRC` also measures the
`src` of another commit.
"""

import argparse
import cProfile
import json
import pstats
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measured import Row, commit, conditions, continue_rows
from shapes import SHAPES, SMALL, make_model, run_in_child

from kvfold.convert import ConvertRequest, convert_checkpoint

_LATENT = {"to": "mla", "kv_rank": 512, "rope_dim": 64}
TARGETS: dict[str, dict[str, Any]] = {
    "GQA-8": {"to": "gqa", "kv_heads": 8},
    "MQA": {"to": "mqa"},
    "MLA free": {**_LATENT, "layout": "free"},
    "MLA engine": {**_LATENT, "layout": "engine"},
}
LAYERS = 2
SAMPLES = 8
LENGTH = 256
# Functions whose time, with all that they call, is a part. Candidates are compared within a fit.
PARTS = {
    "survey": ("slots.py", "survey_layer"),
    "fit": ("layers.py", "fit_layer"),
    "compare": ("walk.py", "measure_error"),
    "passes": ("walk.py", "_run_layer"),
    "output fit": ("output_fit.py", "refit_output_projection"),
}


def measure_forward(folder: Path) -> float:
    """Return the CPU seconds of the stock model's pass over the calibration tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    with torch.no_grad():
        began = time.process_time()
        model(tokens)
    return time.process_time() - began


def measure_conversion(folder: Path, out: Path, target: str, profile: bool) -> Row:
    """Return the CPU seconds of a conversion, by part, and the peak memory of this process."""
    forward = measure_forward(folder)
    request = ConvertRequest(
        model=str(folder),
        out=str(out),
        **TARGETS[target],
        samples=SAMPLES,
        seq_len=LENGTH,
        device="cpu",
        precision="float32",
        **({"positions": False} if hasattr(ConvertRequest, "positions") else {}),
        overwrite=True,
        quiet=True,
    )
    profiler = cProfile.Profile(time.process_time)
    began = time.process_time()
    profiler.runcall(convert_checkpoint, request)
    seconds = time.process_time() - began
    stats = pstats.Stats(profiler)
    if profile:
        stats.sort_stats("cumtime").print_stats("kvfold|linalg", 40)
    times = {
        (Path(file).name, name): figures[3]
        for (file, _, name), figures in stats.stats.items()  # type: ignore[attr-defined]
    }
    parts = {part: round(times.get(function, 0), 1) for part, function in PARTS.items()}
    parts["fit"] = round(parts["fit"] - parts["compare"], 1)
    return {
        "cpu_seconds": round(seconds, 1),
        "fit_a_layer": round((parts["fit"] + parts["survey"]) / LAYERS, 1),
        "forward": round(forward, 1),
        "parts": parts,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def measure_rows(args: argparse.Namespace, done: list[Row]) -> Iterator[Row]:
    """Yield the rows that are not in ``done``, each measured in a process of its own."""
    known = {(row["shape"], row["target"], row["code"]) for row in done}
    codes = {"this": None} | ({"other": args.against} if args.against else {})
    for shape in args.only or SHAPES:
        folder = args.work / shape
        if not folder.exists():
            make_model(folder, SHAPES[shape], LAYERS, vocab_size=SMALL)
        for target in args.targets or TARGETS:
            for code, source in codes.items():
                impossible = target == "GQA-8" and shape != "llama-2-7b"
                impossible |= target == "MLA engine" and shape.startswith("qwen")  # has biases
                if (shape, target, code) in known or impossible:
                    continue
                arguments = ["--work", str(args.work), "--only", shape, "--targets", target]
                arguments += ["--child", *["--profile"] * args.profile]
                row, profile = run_in_child(__file__, arguments, source)
                if profile:
                    print(profile)
                yield {"shape": shape, "target": target, "code": code, **row}


def show(row: Row) -> None:
    parts = ", ".join(f"{name} {seconds}" for name, seconds in row["parts"].items())
    memory = row["peak_bytes"] / 1e9
    print(
        f"{row['shape']} {row['target']} ({row['code']}): {row['fit_a_layer']} s a layer of"
        f" {row['cpu_seconds']} s ({parts}); forward {row['forward']}; {memory:.1f} GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="a folder for models")
    parser.add_argument("--only", nargs="+", choices=SHAPES)
    parser.add_argument("--targets", nargs="+", choices=TARGETS)
    parser.add_argument("--against", type=Path, help="the src folder of another commit")
    parser.add_argument("--profile", action="store_true", help="print the slowest functions")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        model = args.work / args.only[0]
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            row = measure_conversion(model, Path(folder) / "out", args.targets[0], args.profile)
        print(json.dumps(row))
        return
    header = {**conditions(), "commit": commit(), "layers": LAYERS}
    continue_rows(args.json, header, lambda done: measure_rows(args, done), show)


if __name__ == "__main__":
    main()
