"""Peak memory of the host in conversions, drift and uptraining at the widths of 7B and 8B, beside
kvfold's estimate.

    python recipes/benchmarks/bench_memory.py --work /scratch --json recipes/results/memory.json
    python recipes/benchmarks/bench_memory.py --work /scratch --only llama-3-8b --runs polish

Two layers of each shape in random weights, one thread, each run in a process of its own. `small`
vocabularies have 2048 tokens, `full` ones the model's own. A card's memory is not measured.
"""

import argparse
import json
import resource
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from measured import Row, commit, conditions, continue_rows
from shapes import SHAPES, SMALL, make_model, run_in_child

from kvfold.convert import (
    ConvertRequest,
    DriftRequest,
    UptrainRequest,
    convert_checkpoint,
    drift_checkpoints,
    uptrain_checkpoint,
)
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion import memory
from kvfold.convert.stream.stock import load_config

_MQA = {"to": "mqa", "method": "mean"}
_LATENT = {"to": "mla", "kv_rank": 512, "rope_dim": 64}
CONVERSIONS: dict[str, dict[str, Any]] = {
    "fit GQA": {"to": "gqa", "kv_heads": 4},
    "fit MLA": _LATENT,
    "refine": {**_MQA, "refine": 2},
    "polish": {**_MQA, "polish": 2},
}
RUNS = (*CONVERSIONS, "drift", "uptrain")
LAYERS = {"uptrain": 1}  # 16 bytes an element
SAMPLES = 8
LENGTH = 256


def measure_run(folder: Path, out: Path, text: Path, run: str) -> Row:
    """Return the peak of this process in a ``run`` on the model in ``folder``, and its estimate."""
    if run in CONVERSIONS:
        request = ConvertRequest(
            model=str(folder),
            out=str(out),
            **CONVERSIONS[run],
            calibration=(str(text),),
            samples=SAMPLES,
            seq_len=LENGTH,
            device="cpu",
            precision="float32",
            overwrite=True,
            quiet=True,
        )
        estimate = memory.estimate_memory(convert_checkpoint(request).plan, on_gpu=False)[0]
    elif run == "drift":
        sizes = {"samples": SAMPLES, "seq_len": LENGTH, "text": str(text), "device": "cpu"}
        drift_checkpoints(DriftRequest(str(folder), str(folder), **sizes, quiet=True))
        with closing(open_checkpoint(folder)) as opened:
            config = load_config(opened, False)
            elements = opened.count_elements()
        estimate = memory.estimate_comparison_memory(elements, config, SAMPLES * LENGTH, False).host
    else:
        # Gradients of a step's first half are there while its second half runs.
        sizes = {"steps": 2, "batch_tokens": 2048, "seq_len": LENGTH, "eval_sequences": 4}
        request = UptrainRequest(
            str(folder),
            str(out),
            str(text),
            **sizes,
            device="cpu",
            precision="float32",
            overwrite=True,
            fresh=True,
            quiet=True,
        )
        uptrain_checkpoint(request)
        with closing(open_checkpoint(folder)) as opened:
            config = load_config(opened, False)
            elements = opened.count_elements()
        estimate = memory.estimate_uptraining_memory(elements, 0, config, 1024, False, False).host
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"peak_bytes": peak, "estimated_bytes": estimate}


def measure_rows(args: argparse.Namespace, done: list[Row]) -> Iterator[Row]:
    """Yield the rows that are not in ``done``, each measured in a process of its own."""
    known = {(row["shape"], row["vocabulary"], row["run"]) for row in done}
    for shape in args.only or SHAPES:
        for size in args.vocabulary or ("small", "full"):
            vocabulary = SMALL if size == "small" else SHAPES[shape]["vocab_size"]
            for run in args.runs or RUNS:
                if (shape, vocabulary, run) in known:
                    continue
                layers = LAYERS.get(run, 2)
                folder = args.work / f"{shape}-{size}-{layers}"
                arguments = ["--work", str(args.work), "--text", str(args.text), "--runs", run]
                arguments += ["--only", shape, "--vocabulary", size, "--child"]
                if not folder.exists():
                    run_in_child(__file__, [*arguments, "make"])
                row, _ = run_in_child(__file__, [*arguments, run])
                yield {"shape": shape, "vocabulary": vocabulary, "run": run, **row}


def show(row: Row) -> None:
    peak = row["peak_bytes"]
    estimate = row["estimated_bytes"]
    print(
        f"{row['shape']}, {row['vocabulary']} tokens, {row['run']}: {peak / 1e9:.2f} GB, estimated"
        f" {estimate / 1e9:.2f} ({estimate / peak - 1:+.0%})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="a folder for models")
    parser.add_argument("--text", type=Path, required=True, help="a text to calibrate on")
    parser.add_argument("--only", nargs="+", choices=SHAPES)
    parser.add_argument("--vocabulary", nargs="+", choices=("small", "full"))
    parser.add_argument("--runs", nargs="+", choices=RUNS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.child:
        header = {**conditions(), "commit": commit(), "text": f"{SAMPLES} x {LENGTH}"}
        continue_rows(args.json, header, lambda done: measure_rows(args, done), show)
        return
    (run,) = args.runs
    (shape,) = args.only
    (size,) = args.vocabulary
    layers = LAYERS.get(run, 2)
    folder = args.work / f"{shape}-{size}-{layers}"
    if args.child == "make":
        small = {"vocab_size": SMALL} if size == "small" else {}
        make_model(folder, SHAPES[shape], layers, **small)
        print(json.dumps({}))
    else:
        print(json.dumps(measure_run(folder, args.work / f"out-{shape}-{run}", args.text, run)))


if __name__ == "__main__":
    main()
