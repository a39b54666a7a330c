"""Whether fitting in the faster arithmetic changes results: sweeps in bfloat16 with two seeds, and
in float32.

    python recipes/benchmarks/bench_precision.py MODEL --calibration FILE --json
    recipes/results/precision.json

On a CPU, where held-out text is judged in float32. ``difference`` is that of bfloat16 to float32
with the same seed, ``seeds`` that between two seeds, which draw other calibration sequences and
other held-out ones; ``margin`` is half of the 95 % interval of a figure. Finished sweeps stay in
the JSON file and are not run again.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measured import Row, conditions, continue_rows

RUNS = (("bfloat16", 0), ("float32", 0), ("bfloat16", 1))


def swept(given: argparse.Namespace, precision: str, seed: int) -> Row:
    """KL and excess loss of every target of a sweep."""
    options = shlex.split(
        f"--samples {given.samples} --seq-len {given.seq_len} --seed {seed} --precision {precision}"
    )
    options += ["--device", "cpu"]
    options += (
        ["--calibration", given.calibration, "--calibration", "self:0"] if given.calibration else []
    )
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [
            "sweep",
            given.model,
            "--targets",
            given.targets,
            *options,
            "--json",
            file.name,
            "--quiet",
        ]
        subprocess.run(
            [sys.executable, "-m", "kvfold.convert", *command],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found = json.loads(Path(file.name).read_text())
    targets = {
        row["target"]: {"kl": row["kl"], "excess": row["excess"]} for row in found["targets"]
    }
    source = found["source"]
    text = f"{source['sequences']} x {source['length']} held-out tokens"
    return {
        "precision": precision,
        "seed": seed,
        "measured_on": text,
        "targets": targets,
        **conditions(),
    }


def differences(rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Of every target's KL and excess: the difference between arithmetics, between seeds, and the
    interval's half.
    """
    for target, found in rows[0]["targets"].items():
        at = {name: [row["targets"][target][name]["value"] for row in rows] for name in found}
        yield {"target": target} | {
            name: {"difference": one - two, "seeds": three - one, "margin": margin_of(found[name])}
            for name, (one, two, three) in at.items()
        }


def margin_of(figure: dict[str, float]) -> float:
    return figure["margin"] if "margin" in figure else (figure["high"] - figure["low"]) / 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "--targets", default="mla:128+64,64+64,64+32,48+48,32+16 mqa", help="as of kvfold sweep"
    )
    parser.add_argument("--calibration", help="as of kvfold sweep")
    parser.add_argument("--samples", type=int, default=32, help="calibration sequences")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of each")
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    given = parser.parse_args()

    def rows(done: list[Row]) -> Iterator[Row]:
        for precision, seed in RUNS[len(done) :]:
            yield swept(given, precision, seed)

    names = ("targets", "calibration", "samples", "seq_len")
    header = {"model": Path(given.model).name} | {name: vars(given)[name] for name in names}
    header["calibration"] = header["calibration"] and Path(header["calibration"]).name
    earlier = json.loads(given.json.read_text()) if given.json.exists() else header
    if any(earlier.get(name) != value for name, value in header.items()):
        raise SystemExit(
            f"{given.json} has rows of another model or other options; use another file"
        )
    continue_rows(
        given.json,
        header,
        rows,
        lambda row: print(row["precision"], "seed", row["seed"], flush=True),
    )
    found = json.loads(given.json.read_text())
    compared = list(differences(found["rows"]))
    given.json.write_text(json.dumps({**found, "compared": compared}, indent=1) + "\n")
    for row in compared:
        kl = {name: f"{value:+.4f}" for name, value in row["kl"].items()}
        print(
            f"{row['target']:12} KL {kl['difference']}, between seeds {kl['seeds']}, margin"
            f" {kl['margin']}"
        )


if __name__ == "__main__":
    main()
