"""CPU time and duration of `kvfold sweep` and `kvfold convert` by their threads, on shared
machines.

    python recipes/benchmarks/bench_threads.py --json recipes/results/threads.json

runs both on the model that ships: as the machine is, beside two processes that always compute, and
under a quota of one core (a cgroup, where it can be created; otherwise on one processor). Each runs
with one thread, with kvfold's default (as many threads as usable cores, which sleep while they
wait) and with OpenMP's (which spin first). The CPU time of the default is to stay below 1.5 times
that of one thread.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measured import Row, conditions, continue_rows

from kvfold.convert.data import demo_folder

_TEXT = ["--samples", "16", "--seq-len", "128", "--quiet"]
COMMANDS = {
    "sweep": ["sweep", "DEMO", "--targets", "gqa:4,2 mqa", *_TEXT],
    "convert": ["convert", "DEMO", "OUT", "--to", "mqa", "--refine", "20", "--overwrite", *_TEXT],
}
# libgomp's own count of turns before a thread sleeps
THREADS = {"one": {"OMP_NUM_THREADS": "1"}, "default": {}, "spinning": {"GOMP_SPINCOUNT": "300000"}}
_OURS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_GROUP = Path("/sys/fs/cgroup/cpu/kvfold-bench")


@contextmanager
def nothing() -> Iterator[tuple[list[str], str]]:
    yield [], "the machine as it is"


@contextmanager
def busy() -> Iterator[tuple[list[str], str]]:
    """Two processes that always compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield [], "beside two busy processes"
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextmanager
def quota() -> Iterator[tuple[list[str], str]]:
    """A quota of one core, by cgroups version 1, or one processor."""
    try:
        _GROUP.mkdir()
        (_GROUP / "cpu.cfs_quota_us").write_text("100000")
    except OSError:
        yield ["taskset", "-c", "0"], "on one processor (taskset)"
        return
    try:
        yield (
            ["sh", "-c", f'echo $$ > {_GROUP}/cgroup.procs; exec "$@"', "sh"],
            "under a quota of one core (cgroup)",
        )
    finally:
        _GROUP.rmdir()


def measured(words: list[str], extra: dict[str, str]) -> Row:
    """Duration and CPU time of a command, its import of torch included."""
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    subprocess.run(words, env={**kept, **extra}, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(cpu, 1)}


def rows(done: list[Row], folder: str) -> Iterator[Row]:
    seen = [(row["condition"], row["command"], row["threads"]) for row in done]
    for condition in (nothing, busy, quota):
        with condition() as (around, name):
            for command, words in COMMANDS.items():
                for threads, extra in THREADS.items():
                    # What spins takes minutes beside others: one row shows it.
                    spins = threads == "spinning" and (
                        condition is not nothing or command == "convert"
                    )
                    if spins or (name, command, threads) in seen:
                        continue
                    places = {"DEMO": str(demo_folder()), "OUT": f"{folder}/out"}
                    whole = [places.get(word, word) for word in words]
                    load = round(os.getloadavg()[0], 1)
                    found = measured(
                        [*around, sys.executable, "-m", "kvfold.convert", *whole], extra
                    )
                    row = {
                        "condition": name,
                        "command": command,
                        "threads": threads,
                        "load_before": load,
                        **found,
                    }
                    yield row | {"date": conditions()["date"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        header = {**conditions(), "commands": COMMANDS, "environment": THREADS}
        continue_rows(
            args.json,
            header,
            lambda done: rows(done, folder),
            lambda row: print(*row.values(), flush=True),
        )


if __name__ == "__main__":
    main()
