"""What conversions of a real language model do when they write: `kvfold eval` of
SmolLM2-135M-Instruct.

    python recipes/real_models.py checkpoint SMOLLM2
    python recipes/evidence.py SMOLLM2 --calibration FILE --work DIR \\
        --json recipes/results/evidence.json

Each row is the task `replies`, or the loss by position to 8192 tokens, for one target as
fitted, or for a conversion that `--only "MLA 128+64, polished on 1M tokens=FOLDER"` names.
Conversions are kept in DIR and rows that the JSON file holds are not measured again, so a run can
be interrupted. What is printed is the table of docs/results.md.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from real_models import TARGETS, run

from kvfold.convert.measure.eval import eval_checkpoints

sys.path.append(str(Path(__file__).parent / "benchmarks"))
from measured import commit, conditions, continue_rows

from kvfold.convert import EvalRequest

CHOSEN = (
    "MLA 128+64",
    "MLA 64+64",
)  # half and a third of 384 KV-cache elements per token per layer
FIT = ("--samples", "64", "--seq-len", "256")
# Tasks, documents and tokens.
GROUPS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "writing": (("replies",), 16, 256),
    "positions": ((), 4, 8192),
    "positions to 4096": ((), 6, 4096),
    "positions to 2048": ((), 12, 2048),
}


def convert(args: argparse.Namespace, target: str) -> Path:
    """The fitted conversion, made if DIR lacks it."""
    out = args.work / target.replace(" ", "-")
    if not out.exists():
        given = [] if args.calibration is None else ["--calibration", str(args.calibration)]
        text = [*given, "--calibration", "self:0"]  # as real_models.py does
        run(
            ["convert", str(args.model), str(out), *TARGETS[target].split(), *FIT, *text, "--quiet"]
        )
    return Path(out)


def rows(args: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows that ``done`` lacks."""
    known = {(row["target"], row["group"]) for row in done}
    named = {name: Path(folder) for name, _, folder in (each.partition("=") for each in args.only)}
    for group in args.groups.split(","):
        tasks, samples, length = GROUPS[group]
        for target in named or CHOSEN:
            if (target, group) in known:
                continue
            out = named.get(target) or convert(args, target)
            before = conditions()
            started = time.process_time()
            shape = {
                "samples": samples,
                "lengths": (length,),
                "retrieval": False,
                "quiet": True,
                "text": args.text,
            }
            found = eval_checkpoints(EvalRequest(str(args.model), str(out), tasks=tasks, **shape))
            kept = {
                name: value for name, value in vars(found).items() if name not in ("model", "out")
            }
            seconds = round(time.process_time() - started)
            yield {
                "target": target,
                "group": group,
                "length": length,
                **kept,
                "cpu_seconds": seconds,
            } | {
                **before,
                "commit": commit(),
            }


def show(row: dict[str, Any]) -> None:
    """A line of a Markdown table for each measurement of the row."""
    for each in row.get("rows", []):  # rows of an earlier version have none
        figures = f"{each['source']:.2f} | {each['student']:.2f}"
        change = f"{each['difference']:+.3f} ± {each['margin']:.3f}"
        metric = each["metric"].replace("_", " ")
        print(f"| {row['target']} | {metric} | {figures} | {change} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", type=Path, help="default: the text that ships with kvfold")
    parser.add_argument(
        "--text", help="text for the loss by position; default: the held-out text that ships"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for converted checkpoints")
    parser.add_argument(
        "--groups", default=",".join(GROUPS), help="groups of tasks, separated by commas"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME=FOLDER", help="measure only these"
    )
    parser.add_argument("--json", type=Path, help="results file; continued where it exists")
    args = parser.parse_args()
    header = {"model": "SmolLM2-135M-Instruct", "fit": " ".join(FIT)}
    continue_rows(args.json, header, lambda done: rows(args, done), show)


if __name__ == "__main__":
    main()
