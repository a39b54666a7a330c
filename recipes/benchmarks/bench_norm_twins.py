"""What a conversion costs models with norms on queries and keys, beside twins without, on all
held-out text that ships.

    python recipes/benchmarks/bench_norm_twins.py PLAIN NORMED ... --work FOLDER --json
    recipes/results/norm_twins.json

converts every model to MLA 64+64 with ``--refine 100`` on 64 x 256 tokens, or takes what FOLDER has
of an earlier run. Excess is the mean over 256-token windows of the loss of the result minus the
loss of its source, nats per token, with its standard error; KL likewise. ``train_demo.py`` makes
the models (recipes/README.md has the commands).
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measured import conditions, continue_rows
from torch import Tensor

from kvfold.convert.data import read_text

OPTIONS = "--to mla --kv-rank 64 --rope-dim 64 --samples 64 --seq-len 256 --refine 100"
LENGTH = 256
BATCH = 4


def converted(model: Path, work: Path) -> Path:
    """The folder in ``work`` with what `kvfold convert` made of ``model``."""
    out = work / f"{model.parent.name}-r100"
    if not (out / "kvfold.json").exists():
        command = [
            sys.executable,
            "-m",
            "kvfold.convert",
            "convert",
            str(model),
            str(out),
            *OPTIONS.split(),
            "--quiet",
        ]
        subprocess.run(command, check=True)
    return out


def held_out(model: Path) -> Tensor:
    """All windows ``[N, LENGTH]`` of the held-out text that ships."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(read_text("held_out"), verbose=False)["input_ids"]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


@torch.no_grad()
def differences(model: Path, out: Path, tokens: Tensor) -> Tensor:
    """Loss of ``out`` minus that of ``model``, and the KL from it, in every window: ``[N, 2]``."""
    from transformers import AutoModelForCausalLM

    teacher, student = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval()
        for each in (model, out)
    )
    rows = []
    for some in tokens.split(BATCH):
        p, q = (each(some).logits[:, :-1].log_softmax(-1) for each in (teacher, student))
        excess = (p - q).gather(-1, some[:, 1:, None])[..., 0]
        rows.append(torch.stack([excess.mean(1), (p.exp() * (p - q)).sum(-1).mean(1)], 1))
    return torch.cat(rows).double()


def row(model: Path, work: Path) -> dict[str, Any]:
    tokens = held_out(model)
    found = differences(model, converted(model, work), tokens)
    (excess, kl), errors = found.mean(0).tolist(), (found.std(0) / math.sqrt(len(found))).tolist()
    figures = {"excess": excess, "excess_error": errors[0], "kl": kl, "kl_error": errors[1]}
    return {"model": model.parent.name, "windows": len(tokens), **figures, **conditions()}


def show(row: dict[str, Any]) -> None:
    figures = (
        f"{name} {row[name]:+.4f} +- {row[f'{name}_error']:.4f}" for name in ("excess", "kl")
    )
    print(
        f"{row['model']:12} {', '.join(figures)}, standard errors over {row['windows']} windows",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="DIR/demo")
    parser.add_argument("--work", type=Path, required=True, help="folder for the conversions")
    parser.add_argument("--json", type=Path, help="results file; continued where it exists")
    args = parser.parse_args()

    def rows(done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        known = {each["model"] for each in done}
        yield from (
            row(model, args.work) for model in args.models if model.parent.name not in known
        )

    continue_rows(args.json, {"options": OPTIONS, "length": LENGTH}, rows, show)


if __name__ == "__main__":
    main()
