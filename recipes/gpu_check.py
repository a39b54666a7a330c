"""Checks and measures kvfold on a GPU within a lease of some minutes; a CPU can rehearse it.

    python recipes/gpu_check.py --minutes 10                      # on a machine with a GPU
    python recipes/gpu_check.py --stages kernel,decode            # some of the stages
    python recipes/gpu_check.py --model SMOLLM2 --minutes 10      # with a real model
    python recipes/gpu_check.py --rehearse                        # tiny sizes on a CPU

The stages run in the order of their value, each in a process of its own and for at most its own
seconds, and write `results/gpu/STAGE.json` after every row, so that a run that is cut anywhere
leaves the most useful figures. A size that was not reached is not written. A row that fails holds
its error.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Seconds of each stage; those that a stage does not need go to the later ones.
SECONDS = {
    "tests": 90,
    "kernel": 60,
    "decode": 60,
    "convert": 150,
    "train": 120,
    "drift": 40,
    "uptrain": 60,
}


def run_stage(name: str, arguments: argparse.Namespace, seconds: float) -> bool:
    """Run a stage in this process and write its rows. Returns whether every row is right."""
    sys.path[:0] = [str(HERE), str(HERE / "benchmarks")]
    import gpu_stages
    import torch
    from measured import commit, conditions

    device = torch.device("cpu" if arguments.rehearse else "cuda")
    report: dict[str, Any] = {"stage": name, **conditions(device), "commit": commit(), "rows": []}
    if device.type == "cuda":
        report["card"] = torch.cuda.get_device_name(device)
        report["versions"]["cuda"] = torch.version.cuda
    file = arguments.results / f"{name}.json"
    right = True
    with tempfile.TemporaryDirectory(prefix="kvfold-gpu-") as work:
        run = gpu_stages.Run(
            device=device,
            rehearse=arguments.rehearse,
            model=arguments.model,
            text=arguments.text,
            work=Path(work),
            end=time.monotonic() + seconds,
        )
        try:
            for row in getattr(gpu_stages, name)(run):
                report["rows"].append(row)
                right = right and row.get("right", True) and "failed" not in row
                print(name, json.dumps(row), flush=True)
                file.write_text(json.dumps(report, indent=1) + "\n")
        except Exception:
            traceback.print_exc()
            report["failed"] = traceback.format_exc()[-2000:]
            file.write_text(json.dumps(report, indent=1) + "\n")
            right = False
    return right


def start_stage(name: str, arguments: argparse.Namespace, seconds: float) -> bool:
    """Run a stage in a process of its own and kill it after ``seconds``."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), *sys.argv[1:]]
    command += ["--results", str(arguments.results), "--one", name, str(seconds)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if arguments.rehearse:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(seconds + 5) == 0
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {seconds:.0f} s", flush=True)
        return not arguments.rehearse
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", default=",".join(SECONDS), help="separated by commas")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all stages together")
    parser.add_argument("--model", type=Path, help="default: the model that ships")
    parser.add_argument("--text", type=Path, help="default: the text that ships")
    parser.add_argument("--results", type=Path, help="default: recipes/results/gpu")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, seconds = arguments.one
        raise SystemExit(not run_stage(name, arguments, float(seconds)))
    names = arguments.stages.split(",")
    if unknown := sorted({*names} - SECONDS.keys()):
        parser.error(f"--stages {','.join(unknown)}: use some of {','.join(SECONDS)}")
    with tempfile.TemporaryDirectory() as scratch:
        default = Path(scratch) if arguments.rehearse else HERE / "results" / "gpu"
        arguments.results = (arguments.results or default).resolve()
        arguments.results.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + 60 * arguments.minutes
        wrong = []
        for position, name in enumerate(names):
            later = sum(SECONDS[other] for other in names[position + 1 :])
            seconds = max(SECONDS[name], end - time.monotonic() - later)
            if arguments.rehearse:
                seconds = 900
            elif end - time.monotonic() < 5:
                break
            if not start_stage(name, arguments, min(seconds, end - time.monotonic())):
                wrong.append(name)
    print(f"wrong or failed: {', '.join(wrong)}" if wrong else "all that ran is right")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
