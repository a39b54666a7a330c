"""``python tests/fuzz 20000``: that many inputs on two processes; ``python tests/fuzz --seed 123``:
one of them.

``python tests/fuzz 20000 --json recipes/results/fuzz.json`` also writes the counts there and into
docs/safety.md.
"""

import argparse
import io
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "recipes" / "benchmarks")]


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=300, help="inputs 0 to COUNT - 1")
    parser.add_argument("--seed", type=int, help="only the input of this number")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the counts there and into docs/safety.md")
    given = parser.parse_args()
    from fuzz.judge import run_all, sentence
    from fuzz.seeds import SEEDS, make_seeds
    from measured import conditions

    numbers = (
        range(given.first, given.first + given.count)
        if given.seed is None
        else range(given.seed, given.seed + 1)
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stderr(io.StringIO()):
            make_seeds(Path(folder))
        made = time.monotonic() - began
        counts = run_all(
            Path(folder), numbers, given.workers, lambda text: print(text, end="", flush=True)
        )
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    result = {
        **conditions(),
        "commit": commit.stdout.strip(),
        "inputs": [numbers.start, numbers.stop - 1],
        "seeds": len(SEEDS),
        "processes": given.workers,
        "seconds": round(time.monotonic() - began),
        "seconds_of_seeds": round(made),
        "cpu_seconds": round(sum(each.ru_utime + each.ru_stime for each in used)),
        **counts,
    }
    for title in ("commands", "changes"):
        for name, ends in counts[title].items():
            print(f"  {name}: " + ", ".join(f"{count} {end}" for end, count in ends.items()))
    print(sentence(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
        page = ROOT / "docs" / "safety.md"
        page.write_text(
            re.sub(
                r"^On .*\.\./recipes/results/fuzz\.json.*$",
                sentence(result),
                page.read_text(),
                flags=re.M,
            )
        )
    raise SystemExit(result["failures"] > 0)


if __name__ == "__main__":
    run()
