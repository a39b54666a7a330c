"""The excess loss of every target before refinement, after a number of steps, after `auto`, and
after polishing.

    python recipes/benchmarks/bench_refine.py MODEL --calibration FILE --text FILE --json
    recipes/results/refine.json

runs `kvfold convert MODEL .. --to .. --refine ..` for every target, loads each result with stock
transformers and measures its perplexity on 48 windows of 256 tokens of FILE, and of the held-out
text that ships with kvfold: another domain. Excess is ln(perplexity / perplexity of MODEL), nats
per token. Rows that the JSON file holds already are not run again: a table can be made in several
sittings. The targets are meant for a model with 512 KV-cache elements per token per layer.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from measured import conditions, continue_rows

TARGETS = {
    "GQA-4": "--to gqa --kv-heads 4",
    "GQA-2": "--to gqa --kv-heads 2",
    "MQA": "--to mqa",
    "MLA 64+64": "--to mla --kv-rank 64 --rope-dim 64",
    "MLA 48+16": "--to mla --kv-rank 48 --rope-dim 16",
    "MLA 40+24": "--to mla --kv-rank 40 --rope-dim 24",
    "MLA 32+32": "--to mla --kv-rank 32 --rope-dim 32",
    "MLA 48+16 engine": "--to mla --kv-rank 48 --rope-dim 16 --layout engine",
    "MLA 20+12": "--to mla --kv-rank 20 --rope-dim 12",
    "MLA 16+16": "--to mla --kv-rank 16 --rope-dim 16",
    "MLA 24+8": "--to mla --kv-rank 24 --rope-dim 8",
}
WINDOWS = 48
LENGTH = 256


def perplexities(model: Path, folder: Path, text: Path | None) -> dict[str, float]:
    """Of the checkpoint in ``folder``, with the tokenizer of ``model``."""
    from transformers import AutoTokenizer

    from kvfold.convert.data import read_text
    from kvfold.convert.measure.losses import checkpoint_perplexity, token_windows

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = {"other domain": read_text("held_out")}
    if text is not None:
        texts = {"text": text.read_text(encoding="utf-8"), **texts}
    return {
        name: checkpoint_perplexity(folder, token_windows(tokenizer, body, WINDOWS, LENGTH))
        for name, body in texts.items()
    }


def converted(model: Path, options: list[str], place: Path) -> tuple[Path, float]:
    """The folder that `kvfold convert` made of ``model``, and its seconds."""
    out = place / "out"
    command = ["-m", "kvfold.convert", "convert", str(model), str(out), *options, "--quiet"]
    started = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True)
    return out, time.perf_counter() - started


def row(
    args: argparse.Namespace, target: str, refine: str, polish: str, base: dict[str, float]
) -> dict[str, Any]:
    """One row of the table; ``base`` holds the perplexities of the model itself."""
    calibration = [] if args.calibration is None else ["--calibration", str(args.calibration)]
    shape = ["--samples", str(args.samples), "--seq-len", str(LENGTH), "--seed", str(args.seed)]
    with tempfile.TemporaryDirectory(dir=args.work) as place:
        options = [
            *TARGETS[target].split(),
            *calibration,
            *shape,
            "--refine",
            refine,
            "--polish",
            polish,
        ]
        out, seconds = converted(args.model, options, Path(place))
        measured = perplexities(args.model, out, args.text)
        record = json.loads((out / "kvfold.json").read_text())
    return {
        "target": target,
        "refine": refine,
        "steps": [layer["steps"] for layer in record.get("refinement", [])],
        "polish": polish,
        "polished": record.get("polish"),
        "perplexity": measured,
        "excess": {text: math.log(value / base[text]) for text, value in measured.items()},
        "seconds": round(seconds, 1),
        **conditions(),
    }


def rows(args: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows that ``done`` lacks; the first row is the model itself."""
    known = {(row["target"], row.get("refine"), row.get("polish", "0")) for row in done}
    first = (
        done[0]
        if done
        else {"target": "original", "perplexity": perplexities(args.model, args.model, args.text)}
    )
    if not done:
        yield first
    targets = args.targets.split(",") if args.targets else list(TARGETS)
    for polish, refine, target in product(args.polish.split(","), args.refine.split(","), targets):
        if (target, refine, polish) not in known:
            yield row(args, target, refine, polish, first["perplexity"])


def show(row: dict[str, Any]) -> None:
    if "excess" in row:
        figures = "  ".join(f"{text} {value:+.4f}" for text, value in row["excess"].items())
        stage = f"refine {row['refine']:>5} polish {row.get('polish', '0'):>5}"
        print(f"{row['target']:18} {stage}  {figures}  {row['seconds']:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", type=Path, help="default: the text that ships with kvfold")
    parser.add_argument("--text", type=Path, help="held-out text of the calibration's domain")
    parser.add_argument("--targets", help="some of: " + ", ".join(TARGETS))
    parser.add_argument("--refine", default="0,150,auto")
    parser.add_argument("--polish", default="0", help="0, a number of steps, or auto")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, help="folder for converted checkpoints; default: the system's"
    )
    parser.add_argument("--json", type=Path, help="results file; continued where it exists")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    header = {
        "model": args.model.name,
        "samples": args.samples,
        "length": LENGTH,
        "windows": WINDOWS,
    }
    continue_rows(args.json, header, lambda done: rows(args, done), show)


if __name__ == "__main__":
    main()
