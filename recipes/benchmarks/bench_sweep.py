"""Time of `kvfold sweep` against converting each of its targets alone.

    python recipes/benchmarks/bench_sweep.py --json recipes/results/sweep.json            # the
    model that ships python recipes/benchmarks/bench_sweep.py MODEL --calibration FILE --targets
    "gqa:4 mqa mla:64"

Every run is a command of its own, one thread, and its CPU time is counted, so that other work on
the machine does not. A budget's split is chosen by the sweep; the conversion alone is given that
split, which spares it the trials.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measured import conditions

from kvfold.convert.data import demo_folder


def cpu_seconds(command: list[str]) -> float:
    """CPU seconds of ``python -m kvfold.convert`` with these arguments. Raises SystemExit when it
    fails.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "kvfold.convert", *command], env=environment, capture_output=True
    )
    after = os.times()
    if done.returncode:
        raise SystemExit(done.stderr.decode())
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def measure(model: str, options: list[str], work: Path) -> dict[str, Any]:
    """CPU seconds of a sweep, and of every conversion that it stands for."""
    numbers = work / "sweep.json"
    seconds = cpu_seconds(["sweep", model, *options, "--json", str(numbers), "--quiet"])
    found = json.loads(numbers.read_text())
    rows = []
    for index, target in enumerate(found["targets"]):
        command = shlex.split(target["command"].replace(" OUT ", f" {work / str(index)} "))
        alone = cpu_seconds([*command[1:], "--quiet"])
        same = json.loads((work / str(index) / "kvfold.json").read_text())["drift"]["kl"]["value"]
        row = {"target": target["target"], "kind": target["kind"], "alone_seconds": alone}
        rows.append({**row, "kl": target["kl"]["value"], "kl_alone": same})
        print(
            f"{row['kind']}: {alone:.1f} s alone, KL {same:.6f}, in the sweep {rows[-1]['kl']:.6f}",
            flush=True,
        )
    alone = sum(row["alone_seconds"] for row in rows)
    return {
        "sweep_seconds": seconds,
        "alone_seconds": alone,
        "ratio": seconds / alone,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", default=str(demo_folder()), help="default: the model that ships"
    )
    parser.add_argument("--targets", help="as of kvfold sweep")
    parser.add_argument("--calibration", help="as of kvfold sweep")
    parser.add_argument("--samples", default="32", help="calibration sequences")
    parser.add_argument("--seq-len", default="256", help="tokens of each")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args()
    options = ["--samples", given.samples, "--seq-len", given.seq_len]
    options += ["--targets", given.targets] if given.targets else []
    options += ["--calibration", given.calibration] if given.calibration else []
    with tempfile.TemporaryDirectory(prefix="kvfold-bench-") as work:
        found = measure(given.model, options, Path(work))
    what = (
        f"CPU seconds, {given.samples} x {given.seq_len} calibration tokens, model"
        f" {Path(given.model).name}"
    )
    if given.json:
        given.json.write_text(json.dumps({"what": what, **conditions(), **found}, indent=2) + "\n")
    print(
        f"sweep {found['sweep_seconds']:.1f} s, alone {found['alone_seconds']:.1f} s together:"
        f" {found['ratio']:.2f}"
    )


if __name__ == "__main__":
    main()
