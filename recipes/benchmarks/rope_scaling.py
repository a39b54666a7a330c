"""Rope scaling past the original length: the model that ships, with each type, against its
conversions.

    python recipes/benchmarks/rope_scaling.py --json recipes/results/rope_scaling.json

The model was trained on 512 positions and gets 2048 by linear, llama3, yarn and longrope in its
config.json, without training; default has no scaling, for comparison. ``MLA full`` has a latent
and rotary keys that hold everything; the other targets are calibrated on 8 x 1024 tokens. Excess
loss by position on 4 x 2048 tokens of the held-out text that ships, in nats per token, and the
largest difference of a token's loss.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measured import Row, conditions, continue_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.attention.drift.compare import compute_margin, split_positions
from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder, read_text
from kvfold.convert.measure.losses import compute_token_losses, cut_token_windows

ORIGINAL = 512
FACTOR = 4.0
PAIRS = 16
# longrope divides each pair by a factor of its own: here none of the quick pairs, and the slow ones
# by FACTOR.
_DIVISORS = [FACTOR ** (pair / (PAIRS - 1)) for pair in range(PAIRS)]
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": FACTOR},
    "llama3": {"factor": FACTOR, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": FACTOR},
    "longrope": {"factor": FACTOR, "short_factor": _DIVISORS, "long_factor": _DIVISORS},
}
CALIBRATED = {"samples": 8, "seq_len": 1024}
TARGETS: dict[str, dict[str, Any]] = {
    "MLA full": {
        "to": "mla",
        "kv_rank": 257,
        "rope_dim": 256,
        "method": "svd",
        "allow_growth": True,
    },
    "MLA 32+32": {"to": "mla", "kv_rank": 32, "rope_dim": 32, **CALIBRATED},
    "MLA 32+32, layout engine": {
        "to": "mla",
        "kv_rank": 32,
        "rope_dim": 32,
        "layout": "engine",
        **CALIBRATED,
    },
    "GQA-2": {"to": "gqa", "kv_heads": 2, **CALIBRATED},
}


def scaled(kind: str, folder: Path) -> Path:
    """A copy of the model that ships whose rotary embedding is scaled by ``kind`` to `FACTOR` times
    its positions.
    """
    shutil.copytree(demo_folder(), folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    table = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": ORIGINAL,
        **TYPES[kind],
    }
    config |= {"max_position_embeddings": int(ORIGINAL * FACTOR), "rope_parameters": table}
    file.write_text(json.dumps(config))
    return folder


def losses(folder: str | Path, tokens: torch.Tensor) -> torch.Tensor:
    return compute_token_losses(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokens
    ).double()


def rows(args: argparse.Namespace, done: list[Row]) -> Iterator[Row]:
    known = {(row["type"], row["target"]) for row in done}
    tokens = cut_token_windows(
        AutoTokenizer.from_pretrained(demo_folder()),
        read_text("held_out"),
        4,
        int(ORIGINAL * FACTOR),
    )
    for kind in TYPES:
        with tempfile.TemporaryDirectory() as place:
            source = scaled(kind, Path(place) / kind)
            expected = losses(source, tokens)
            for target, options in TARGETS.items():
                if (kind, target) in known or (kind == "longrope" and "layout" in options):
                    continue  # layout engine has no longrope
                out = f"{place}/out-{target}"
                convert_checkpoint(
                    ConvertRequest(source, out, dtype="float32", quiet=True, **options)
                )
                excess = losses(out, tokens) - expected
                stretches = []
                for first, last in split_positions(tokens.shape[1]):
                    each = [part[:, first - 1 : last - 1].mean(1) for part in (expected, excess)]
                    figures = {
                        "source": float(each[0].mean()),
                        "excess": float(each[1].mean()),
                        "margin": compute_margin(each[1]),
                    }
                    stretches.append({"from": first, "to": last, **figures})
                largest = float(excess.abs().max())
                yield {
                    "type": kind,
                    "target": target,
                    "largest": largest,
                    "positions": stretches,
                    **conditions(),
                }


def show(row: Row) -> None:
    """A line of a Markdown table, and the largest change."""
    cells = [f"{each['excess']:+.3f}" for each in row["positions"]]
    print(
        f"| {row['type']}, {row['target']} | {' | '.join(cells)} | {row['largest']:.1e}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="results file; continued where it exists")
    args = parser.parse_args()
    continue_rows(args.json, {"calibrated": CALIBRATED}, lambda done: rows(args, done), show)


if __name__ == "__main__":
    main()
