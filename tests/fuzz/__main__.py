"""``python tests/fuzz 20000``: that many inputs on two processes; ``python tests/fuzz --seed 123``: one of them."""

import argparse
import io
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=300, help="inputs 0 to COUNT - 1")
    parser.add_argument("--seed", type=int, help="only the input of this number")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    from fuzz.judge import run_all
    from fuzz.seeds import SEEDS, make_seeds

    numbers = range(given.first, given.first + given.count) if given.seed is None else range(given.seed, given.seed + 1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stderr(io.StringIO()):
            make_seeds(Path(folder))
        made = time.monotonic() - began
        ends = run_all(Path(folder), numbers, given.workers, lambda text: print(text, end="", flush=True))
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(each.ru_utime + each.ru_stime for each in used)
    minutes = (time.monotonic() - began) / 60
    print(f"{date.today()}, commit {commit}: inputs {numbers.start} to {numbers.stop - 1} of {len(SEEDS)} seeds")
    for command in sorted({command for command, _ in ends}):
        print(f"  {command}: " + ", ".join(f"{ends[command, end]} {end}" for end in ("done", "refused", "failed")))
    failures = sum(count for (_, end), count in ends.items() if end == "failed")
    print(f"{failures} failures in {ends.total()} inputs")
    print(f"{minutes:.1f} minutes on {given.workers} processes, {made:.0f} s of them for the seeds; {cpu:.0f} s of CPU")
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    run()
