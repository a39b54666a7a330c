"""Excess loss of a model in layout ``kvfold``: every target by weights alone and calibrated.

    python recipes/demo/train_demo.py --output DIR --texts shipped --gpt-neox --steps 600 --warmup
    50 python recipes/benchmarks/bench_own_layout.py DIR/demo --json recipes/results/gpt_neox.json
    --trained "..."

Perplexity on windows of 256 tokens of the held-out text that ships; excess is ln(perplexity /
perplexity of MODEL), nats per token. Nothing is refined. Rows that the JSON file holds already are
not run again. The targets are meant for a model with 512 KV-cache elements per token per layer, of
whose heads 8 dims rotate; ``MLA full`` holds everything.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measured import conditions, continue_rows
from transformers import AutoTokenizer

from kvfold.attention import register_models
from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import read_text
from kvfold.convert.measure.losses import checkpoint_perplexity, token_windows

LENGTH = 256
TARGETS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "MLA full": (("svd",), {"to": "mla", "kv_rank": 256, "rope_dim": 64, "allow_growth": True}),
    "GQA-4": (("mean", "principal"), {"to": "gqa", "kv_heads": 4}),
    "GQA-2": (("mean", "principal"), {"to": "gqa", "kv_heads": 2}),
    "MQA": (("mean", "principal"), {"to": "mqa"}),
    "MLA 112+16": (("svd", "principal"), {"to": "mla", "kv_rank": 112, "rope_dim": 16}),
}


def rows(args: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows that ``done`` lacks; the first row is the model itself."""
    windows = token_windows(
        AutoTokenizer.from_pretrained(args.model), read_text("held_out"), args.windows, LENGTH
    )
    first = (
        done[0]
        if done
        else {"target": "original", "perplexity": checkpoint_perplexity(args.model, windows)}
    )
    if not done:
        yield first
    known = {(row["target"], row.get("method")) for row in done}
    for target, (methods, options) in TARGETS.items():
        for method in methods:
            if (target, method) not in known:
                with tempfile.TemporaryDirectory() as place:
                    out = converted(args, method, options, Path(place) / "out")
                    measured = checkpoint_perplexity(out, windows)
                excess = math.log(measured / first["perplexity"])
                yield {
                    "target": target,
                    "method": method,
                    "perplexity": measured,
                    "excess": excess,
                    **conditions(),
                }


def converted(args: argparse.Namespace, method: str, options: dict[str, Any], out: Path) -> Path:
    """The folder of MODEL converted by ``method``."""
    text = (
        {"samples": args.samples, "seq_len": LENGTH, "refine": 0} if method == "principal" else {}
    )
    convert_checkpoint(
        ConvertRequest(str(args.model), str(out), method=method, quiet=True, **options, **text)
    )
    return out


def show(row: dict[str, Any]) -> None:
    if "excess" in row:
        print(f"{row['target']:12} {row['method']:10} {row['excess']:+.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--samples", type=int, default=32, help="calibration sequences")
    parser.add_argument("--windows", type=int, default=48, help="windows of held-out text")
    parser.add_argument("--json", type=Path, help="results file; continued where it exists")
    parser.add_argument("--trained", help="how MODEL came about, to be noted in the results file")
    args = parser.parse_args()
    register_models()
    sizes = {"samples": args.samples, "length": LENGTH, "windows": args.windows}
    header = {
        "model": args.model.name,
        **({"trained": args.trained} if args.trained else {}),
        **sizes,
    }
    continue_rows(args.json, header, lambda done: rows(args, done), show)


if __name__ == "__main__":
    main()
