"""The claims about GPUs in one command, as many as fit in the minutes given; rehearsed on a CPU by
`.ci/run`.

    python recipes/gpu_check.py --model MODEL --minutes 30        # on a machine with a card python
    recipes/gpu_check.py --stages tests,kernel             # some of the stages python
    recipes/gpu_check.py --rehearse                        # tiny sizes on a CPU, Triton interpreted

Each stage runs in a process of its own, within its share of the minutes that are left, and writes
`recipes/results/gpu/STAGE.json`: its rows so far, status, card, driver, versions and commit. A
stage that fails is recorded with its traceback and the next one runs; so is a size that fails, in
its row. Stages that are done are skipped when the command is repeated; --again measures them again.
docs/gpu.md says how models and packages travel to a machine without a network, and what the
rehearsal cannot cover. Without --model the demo model that ships is converted.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# In order of value: the function, and the minutes of 30 that it may take.
STAGES = {
    "tests": ("gpu.precise:tests", 3.5),
    "attention": ("gpu.precise:attention", 1.0),
    "kernel": ("gpu.speed:kernel", 3.0),
    "tiles": ("gpu.speed:tiles", 1.0),
    "decode": ("gpu.speed:decode", 4.0),
    "drift": ("gpu.precise:drift", 2.0),
    "convert": ("gpu.conversion:convert", 7.0),
    "train": ("gpu.conversion:train", 7.0),
    "uptrain": ("gpu.conversion:uptrain", 1.5),
}
# Far more than any stage takes, on a machine that is busy as well.
REHEARSAL_MINUTES = 15.0
# The figures of each stage in the last table, from the least to the largest of its rows.
SHOWN = {
    "tests": ("tests", "wrong", "skipped"),
    "attention": ("error_over_formula",),
    "kernel": ("copy_gb_per_s", "gb_per_s", "of_copy"),
    "tiles": ("gb_per_s",),
    "decode": ("decode_tokens_per_s", "step_ms", "fits_tokens"),
    "drift": ("kl_minus_cpu", "floor_kl"),
    "convert": ("seconds", "excess_minus_cpu", "per_layer"),
    "train": ("tokens_per_s", "of_bf16", "peak_bytes", "kl"),
    "uptrain": ("tokens_per_s", "peak_bytes"),
}


def run_stage(name: str, arguments: argparse.Namespace, limit: float) -> None:
    """Run one stage in this process; its file is rewritten after every row, so that nothing
    measured is lost.
    """
    began = time.monotonic()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    file = arguments.results / f"{name}.json"
    report = dict[str, Any](stage=name, status="running", rows=[])
    try:
        sys.path[:0] = [str(HERE), str(HERE / "benchmarks"), str(HERE.parent / "tests")]
        import torch
        from gpu.card import Check, card

        from kvfold.convert.data import demo_folder

        device = torch.device("cpu" if arguments.rehearse else "cuda")
        report |= {"rehearsal": arguments.rehearse, **card(device, arguments.commit)}
        module, function = STAGES[name][0].split(":")
        with tempfile.TemporaryDirectory(prefix=f"kvfold-{name}-") as work:
            model = arguments.model or demo_folder()
            ends = began + limit
            check = Check(device, arguments.rehearse, model, arguments.text, Path(work), ends)
            for row in getattr(import_module(module), function)(check):
                report["rows"].append(row)
                print(name, json.dumps(row), flush=True)
                _write(file, {**report, "seconds": time.monotonic() - began})
        report["status"] = "done"
    except Exception:
        report |= {"status": "failed", "traceback": traceback.format_exc()}
    _write(file, {**report, "seconds": time.monotonic() - began})


def _end_with_parent() -> None:
    """Kill this stage and its processes when standard input closes: its parent was killed, and the
    card is in use.
    """
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def stage_report(name: str, arguments: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Run one stage in a process, for at most ``limit`` seconds, and return its report."""
    file = arguments.results / f"{name}.json"
    if (
        file.exists()
        and not arguments.again
        and (report := json.loads(file.read_text()))["status"] == "done"
    ):
        return {**report, "status": "done before"}
    file.unlink(missing_ok=True)
    options = [each for each in sys.argv[1:] if each != "--again"]
    command = [
        sys.executable,
        __file__,
        *options,
        "--results",
        str(arguments.results),
        "--one",
        name,
        str(limit),
    ]
    # Nothing may wait for a network that is not there.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if arguments.rehearse:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, process_group=0, stdin=subprocess.PIPE)
    status = "failed"
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        status = "out of time"
    finally:
        if process.poll() is None:
            # The stage is the leader of its own group, with the processes that it started.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    report = json.loads(file.read_text()) if file.exists() else {"stage": name, "rows": []}
    if report.get("status") not in ("done", "failed"):
        report |= {"status": status}
        report.setdefault(
            "traceback",
            f"its process ended with status {process.returncode}, after {limit:.0f} s at most",
        )
        _write(file, report)
    return report


def _write(file: Path, report: dict[str, Any]) -> None:
    file.with_suffix(".new").write_text(json.dumps(report, indent=1) + "\n")
    file.with_suffix(".new").replace(file)


def summary(reports: list[dict[str, Any]]) -> str:
    """A line for each stage: status, seconds, rows, wrong and failed rows, aims reached, and
    figures; then tracebacks.

    A range of figures is that of all rows of the stage.
    """
    lines = [
        f"{'stage':12}{'status':14}{'seconds':>8}{'rows':>6}{'wrong':>7}{'failed':>8}{'aims':>10}  "
        " figures"
    ]
    for report in reports:
        rows = report["rows"]
        wrong = sum(row.get("right") is False for row in rows)
        failed = sum("failed" in row for row in rows)
        aims = [row["reached"] for row in rows if "reached" in row]
        reached = f"{sum(aims)} of {len(aims)}" if aims else "-"
        counts = f"{report.get('seconds', 0):8.0f}{len(rows):6}{wrong:7}{failed:8}{reached:>10}"
        lines.append(
            f"{report['stage']:12}{report['status']:14}{counts}   {_figures(report['stage'], rows)}"
        )
    for report in reports:
        ends = [report["traceback"]] if "traceback" in report else []
        ends += list(
            dict.fromkeys(
                row["failed"].strip().splitlines()[-1] for row in report["rows"] if "failed" in row
            )
        )
        lines += [f"{report['stage']}: {text.strip().splitlines()[-1]}" for text in ends]
    return "\n".join(lines)


def _figures(stage: str, rows: list[dict[str, Any]]) -> str:
    found = {
        name: [row[name] for row in rows if row.get(name) is not None] for name in SHOWN[stage]
    }
    ranges = {
        name: sorted({f"{min(each):.4g}", f"{max(each):.4g}"}, key=float)
        for name, each in found.items()
        if each
    }
    return ", ".join(f"{name} {' to '.join(each)}" for name, each in ranges.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stages", default=",".join(STAGES), help="some of them, separated by commas"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of all stages together")
    parser.add_argument(
        "--model",
        type=Path,
        help="the checkpoint to convert, such as SmolLM2-135M; default: the demo's",
    )
    parser.add_argument(
        "--text", type=Path, help="calibration and training text; default: the text that ships"
    )
    parser.add_argument(
        "--results", type=Path, help="default: recipes/results/gpu; a rehearsal keeps none"
    )
    parser.add_argument(
        "--commit",
        help="written to the results; default: what git says, where it and its history are",
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="the same code with tiny sizes on a CPU"
    )
    parser.add_argument("--again", action="store_true", help="run stages again that are done")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        run_stage(arguments.one[0], arguments, float(arguments.one[1]))
        return
    names = arguments.stages.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        raise SystemExit(
            f"--stages {','.join(unknown)}: no such stage; use some of {','.join(STAGES)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        arguments.results = arguments.results or (
            Path(folder) if arguments.rehearse else HERE / "results" / "gpu"
        )
        arguments.results.mkdir(parents=True, exist_ok=True)
        if arguments.rehearse:
            # Nothing is timed, so that stages may share the machine.
            with ThreadPoolExecutor(2) as pool:
                reports = list(
                    pool.map(
                        partial(stage_report, arguments=arguments, limit=60 * REHEARSAL_MINUTES),
                        names,
                    )
                )
        else:
            reports = []
            ends = time.monotonic() + 60 * arguments.minutes
            for place, name in enumerate(names):
                # What earlier stages did not need goes to the later ones.
                share = STAGES[name][1] / sum(STAGES[each][1] for each in names[place:])
                reports.append(
                    stage_report(name, arguments, max(1.0, (ends - time.monotonic()) * share))
                )
    print(f"\n{summary(reports)}")
    rows = [row for report in reports for row in report["rows"]]
    right = all(row.get("right", True) and "failed" not in row for row in rows)
    raise SystemExit(not (right and all("done" in each["status"] for each in reports)))


if __name__ == "__main__":
    main()
