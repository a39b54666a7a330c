"""Runs an input in a forked child with limits, and judges how it ended.

Right is exit status 0 with equal weights or a result that ``kvfold verify`` accepts, or 2 with one
clear line.
"""

import gc
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import torch
from fuzz.inputs import Input, draw, prepare, smaller
from helpers import forked
from safetensors.torch import load_file

from kvfold.convert.cli import main
from kvfold.convert.errors import KvfoldError
from kvfold.convert.measure import bench, bench_worker
from kvfold.convert.measure.verify import verify_checkpoint

CPU_SECONDS = 20
WAITING = 300
MEMORY = 1_500_000_000
FILE = 1 << 28
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")
State = dict[str, tuple[int, int, int, str]]


def judged(seeds: Path, home: Path, drawn: Input) -> tuple[str, int, str]:
    """Runs an input in the new folder ``home``.

    Returns the kind of its first change, the exit status, and the fault with what was done, if any.
    """
    case = home / "case"
    shutil.rmtree(home, ignore_errors=True)
    try:
        made = prepare(seeds, case, drawn)
        before = listing(home)
        end, fault = limited(home / "log", case, drawn)
        fault = fault or of_status(end) or left_behind(before, listing(home), drawn, end.status)
        if not fault and end.status == 0:
            fault = of_results(seeds, case, drawn, end.stdout)
        said = f"{drawn}\n  made: {'; '.join(made)[:1000]}\n  fault: {fault[:3000]}\n"
        return made[0].split()[0] if made else "none", end.status, said if fault else ""
    finally:
        shutil.rmtree(home, ignore_errors=True)


def outcome(seeds: Path, number: int) -> tuple[str, str, int, str]:
    """The command of input ``number``, and what ``judged`` returns, with as few changes as show a
    fault.
    """
    drawn = draw(number)
    home = seeds / f"run-{os.getpid()}"
    kind, status, found = judged(seeds, home, drawn)
    while found:
        less = next(
            ((each, said) for each in smaller(drawn) if (said := judged(seeds, home, each)[2])),
            None,
        )
        if less is None:
            break
        drawn, found = less
    return drawn.words[0], kind, status, found


# The run


def limited(log: Path, case: Path, drawn: Input) -> tuple[forked.Ended, str]:
    """The end of the command, and the limit that it broke, if any."""
    log.mkdir()

    def work() -> None:
        os.chdir(case)
        tempfile.tempdir = str(case)  # what is left there is seen too
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        bench.subprocess = SimpleNamespace(run=bench_in_fork)
        main(drawn.words)

    child = forked.start(log, work)
    began = time.monotonic()
    fault = ""
    while (waited := os.wait4(child, os.WNOHANG))[0] == 0:
        if time.monotonic() - began > WAITING:
            fault = f"hangs for {WAITING} s"
        elif (
            int(Path(f"/proc/{child}/statm").read_text().split()[1]) * resource.getpagesize()
            > MEMORY
        ):
            fault = f"takes more than {MEMORY} bytes"
        if fault:
            os.kill(child, signal.SIGKILL)
            waited = os.wait4(child, 0)
            break
        time.sleep(0.002)
    out, err = ((log / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    end = forked.Ended(os.waitstatus_to_exitcode(waited[1]), out, err)
    used = waited[2]
    if not fault and (end.status == -signal.SIGXCPU or used.ru_utime + used.ru_stime > CPU_SECONDS):
        fault = f"takes more than {CPU_SECONDS} s of CPU"
    return end, fault


def bench_in_fork(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` of the timing worker, without the seconds of imports of a new process."""
    folder = Path(command[-1]).parent / "log"

    end = forked.run(folder, lambda: bench_worker.run_task(Path(command[-2]), Path(command[-1])))
    shutil.rmtree(folder)
    return subprocess.CompletedProcess(command, end.status, end.stdout, end.stderr)


# The judgment


def of_status(end: forked.Ended) -> str:
    """What is wrong with the exit status and what was printed."""
    shown = end.stderr[-1500:]
    if end.status not in (0, 2):
        return f"exit status {end.status}: {shown}"
    if (
        "Traceback" in end.stderr
        or "error: unexpected" in end.stderr
        or "the system:" in end.stderr
    ):
        return f"an error that nobody foresaw: {shown}"
    if control := CONTROL.search(end.stderr.replace("\r", "")) or CONTROL.search(end.stdout):
        return f"a control character {control[0]!r}: {shown}"
    errors = [line for line in end.stderr.splitlines() if line.startswith("error:")]
    if len(errors) != (end.status == 2):
        return f"{len(errors)} lines of error with exit status {end.status}: {shown}"
    if errors:
        last = [line for line in end.stderr.splitlines() if not line.startswith("  ")][-1]
        if last != errors[0] or not 12 < len(last) < 7000:
            return f"no clear last line: {shown}"
    return ""


def listing(folder: Path) -> State:
    """Kind, size, time of the last change and target of everything below ``folder``."""
    found = {}
    for path in folder.rglob("*"):
        state = path.lstat()
        target = os.readlink(path) if path.is_symlink() else ""
        size = 0 if path.is_dir() else state.st_size
        found[str(path.relative_to(folder))] = (
            state.st_mode,
            size,
            0 if path.is_dir() else state.st_mtime_ns,
            target,
        )
    return found


def left_behind(before: State, after: State, drawn: Input, status: int) -> str:
    """What changed besides the files that the command may write."""
    words = list(drawn.words)
    may = [
        words[at + 1]
        for at in range(len(words) - 1)
        if words[at] in ("--json", "--report", "--plot")
    ]
    # a link that the user names is followed
    names = {os.path.normpath(f"case/{'kept' if name == 'link' else name}") for name in may}
    if status == 0 or drawn.words[0] == "uptrain":
        names |= {"case/result.training"}
    if status == 0:
        names |= {"case/result", "case/result.log"}
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    own = [name for name in changed if name.split("/")[0] != "log"]
    wrong = [
        name
        for name in own
        if not any(name == each or name.startswith(each + "/") for each in names)
        and not (status == 0 and re.match(r"case/result\.\d+[kM]?/|case/result\.\d+[kM]?$", name))
        and not (
            status == 0 and any(each.startswith(name + "/") for each in names)
        )  # folders around a new report
        and not (".result.kvfold-" in name and "--calibration" in words)  # finished layers
    ]
    if any(
        before.get(name, (0o100000,))[0] & 0o170000 != 0o100000
        for name in own
        if name in names and name in before
    ):
        return f"written through what is no file: {own}"
    return f"left behind or changed: {wrong}" if wrong else ""


def strict(text: str) -> Any:
    """JSON as a strict reader takes it: no NaN, no name twice, no half of a surrogate pair."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), "a name twice"
        return dict(pairs)

    value = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def of_results(seeds: Path, case: Path, drawn: Input, stdout: str) -> str:
    """What is wrong with the files and the JSON of a command that says that all is well."""
    words = list(drawn.words)
    try:
        last = {
            word: words[at + 1] for at, word in enumerate(words[:-1])
        }  # of an option that is given twice
        if place := last.get("--json"):
            strict(stdout if place == "-" else (case / place).read_text())
        if "--report" in words and (page := case / last["--report"] / "report.html").exists():
            ElementTree.fromstring(page.read_text().partition("\n")[2])
        if (out := case / "result").exists():
            # A source with a wrong value that no conversion reads, as of the dropout, passes it on.
            if (problems := verified(out)) and not verified(case / "source"):
                return f"verify: {problems}"
            if drawn.command == "convert":
                return unequal(case / "source", out)
        if drawn.words[0] == "verify":
            return accepted(seeds / drawn.seed, case / "source")
    except Exception:
        return f"a result that cannot be read: {traceback.format_exc()[-1500:]}"
    return ""


def verified(folder: Path) -> list[str]:
    """What verify says against a checkpoint."""
    try:
        return verify_checkpoint(folder).problems[:3]
    except KvfoldError as error:
        return [str(error)]


def unequal(source: Path, out: Path) -> str:
    """A tensor outside the attention that is not what the source has, byte for byte."""
    theirs = weights(source)
    ours = weights(out)
    for name in theirs.keys() & ours.keys():
        one = theirs[name]
        other = ours[name]
        if "att" in name or one.dtype != other.dtype:
            continue
        if one.shape != other.shape or not torch.equal(bits(one), bits(other)):
            return f"tensor {name} differs from the source's"
    return ""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    values = [load_file(file) for file in files if file.is_file()]
    if not files:
        values = [torch.load(file, weights_only=True) for file in sorted(folder.glob("*.bin"))]
    return {name: value for each in values for name, value in each.items()}


def accepted(seed: Path, out: Path) -> str:
    """A file that the record names and that is not as it was recorded."""
    record = seed / "kvfold.json"
    if not record.exists() or (out / "kvfold.json").read_bytes() != record.read_bytes():
        return ""
    for name in json.loads(record.read_bytes())["files"]:
        if (out / name).read_bytes() != (seed / name).read_bytes():
            return f"verify accepts a changed {name}"
    return ""


# Many of them


def run_all(
    seeds: Path, numbers: range, workers: int, said: Callable[[str], object]
) -> dict[str, Any]:
    """Judges the inputs of ``numbers`` in forked ``workers``; ``said`` gets each failure.

    Returns how many inputs of each command and of each kind of change end how, and the number of
    failures.
    """
    torch.set_num_threads(1)
    gc.freeze()  # what is imported here is not looked through again in every child
    ends = Counter[tuple[str, str, str]]()
    with get_context("fork").Pool(workers) as pool:
        for command, kind, status, fault in pool.imap_unordered(partial(outcome, seeds), numbers):
            end = "failed" if fault else "refused" if status else "done"
            ends.update([("commands", command, end), ("changes", kind, end)])
            if fault:
                said(fault)
            if (count := ends.total() // 2) % 1000 == 0:
                print(f"{count} of {len(numbers)} inputs", file=sys.stderr, flush=True)
    counts: dict[str, Any] = {
        "failures": sum(ends[each] for each in ends if each[::2] == ("commands", "failed"))
    }
    for title, name, _ in sorted(ends):
        kinds = ("done", "refused", "failed")
        counts.setdefault(title, {})[name] = {end: ends[title, name, end] for end in kinds}
    return counts


def sentence(result: Mapping[str, Any]) -> str:
    """What docs/safety.md says of the result of a run."""
    ends = {
        end: sum(each[end] for each in result["commands"].values())
        for end in ("done", "refused", "failed")
    }
    cores = (
        f"{result['processes']} of {result['machine']['cpus']} cores of an"
        f" {result['machine']['processor']}"
    )
    return (
        f"On {result['date']}, at commit {result['commit']}, {sum(ends.values()):,} inputs took"
        f" {result['seconds'] / 60:.0f} minutes on {cores}: {ends['done']:,} ended well,"
        f" {ends['refused']:,} were refused, {ends['failed']:,} failed"
        " ([counts](../recipes/results/fuzz.json))."
    )
