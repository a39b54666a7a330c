"""Peak memory of the host in conversions, drift and uptraining at the widths of 7B and 8B, beside
kvfold's estimate.

    python recipes/benchmarks/bench_memory.py --work /scratch --json recipes/results/memory.json
    python recipes/benchmarks/bench_memory.py --work /scratch --only llama-3-8b --runs polish

Two layers of each shape in random weights, one thread, each run in a process of its own. `small`
vocabularies have 2048 tokens, `full` ones the model's own. A card's memory is not measured.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from measured import Row, commit, conditions, continue_rows

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
from kvfold.convert.data import demo_folder
from kvfold.convert.stream.stock import load_config

SHAPES: dict[str, dict[str, int]] = {
    "llama-2-7b": {"intermediate_size": 11008, "vocab_size": 32000},
    "llama-3-8b": {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
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


def make_shape(folder: Path, name: str, vocabulary: int, layers: int) -> None:
    """Write a model of the shape ``name`` in random weights, with the tokenizer that ships."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    sizes = SHAPES[name] | {"hidden_size": 4096, "num_attention_heads": 32}
    sizes |= {"num_hidden_layers": layers, "vocab_size": vocabulary}
    config = AutoConfig.for_model("llama", **sizes, max_position_embeddings=8192)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_folder()).save_pretrained(folder)


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
        estimate = memory.estimate_memory_and_disk(convert_checkpoint(request).plan).host
    elif run == "drift":
        sizes = {"samples": SAMPLES, "seq_len": LENGTH, "text": str(text), "device": "cpu"}
        drift_checkpoints(DriftRequest(str(folder), str(folder), **sizes, quiet=True))
        with closing(open_checkpoint(folder)) as opened:
            config = load_config(opened, False)
            elements = memory.count_elements(opened)
        estimate = memory.estimate_comparison(elements, config, SAMPLES * LENGTH, False).host
    else:
        sizes = {"steps": 1, "batch_tokens": 1024, "seq_len": LENGTH, "eval_sequences": 4}
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
            elements = memory.count_elements(opened)
        estimate = memory.estimate_uptraining(elements, 0, config, 1024, False, False).host
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"peak_bytes": peak, "estimated_bytes": estimate}


def measure_rows(args: argparse.Namespace, done: list[Row]) -> Iterator[Row]:
    """Yield the rows that are not in ``done``, each measured in a process of its own."""
    known = {(row["shape"], row["vocabulary"], row["run"]) for row in done}
    for shape in args.only or SHAPES:
        for size in args.vocabulary or ("small", "full"):
            vocabulary = 2048 if size == "small" else SHAPES[shape]["vocab_size"]
            for run in args.runs or RUNS:
                if (shape, vocabulary, run) in known:
                    continue
                layers = LAYERS.get(run, 2)
                folder = args.work / f"{shape}-{size}-{layers}"
                script = [sys.executable, "-P", __file__, "--work", str(args.work)]
                script += ["--only", shape, "--vocabulary", size, "--text", str(args.text)]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                environment["PYTHONPATH"] = os.pathsep.join(
                    [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
                )
                for child in ["make"] * (not folder.exists()) + [run]:
                    command = [*script, "--runs", run, "--child", child]
                    result = subprocess.run(
                        command, env=environment, stdout=-1, text=True, check=True
                    )
                row = json.loads(result.stdout.splitlines()[-1])
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
        make_shape(folder, shape, 2048 if size == "small" else SHAPES[shape]["vocab_size"], layers)
        print(json.dumps({}))
    else:
        print(json.dumps(measure_run(folder, args.work / f"out-{shape}-{run}", args.text, run)))


if __name__ == "__main__":
    main()
