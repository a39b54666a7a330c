"""Conversions that are killed, starved and lied to: OUT is absent, as it was, or what an undisturbed run writes.

``python -m pytest -m faults tests/faults`` runs 12 cases, ``KVFOLD_CASES=600`` before it as many. Each is a forked
``kvfold convert`` in which one call of the system, drawn from a seed, is killed or interrupted, fails as on a full or
broken disk, or finds the source changed; or which has few descriptors, little memory, or a second run beside it.
"""

import errno
import io
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from helpers import forked

from kvfold.convert.cli import main
from kvfold.convert.data import demo_folder

Whole = dict[str, dict[str, bytes]]

pytestmark = [pytest.mark.faults, pytest.mark.slow]
CASES = int(os.environ.get("KVFOLD_CASES", "12"))
KINDS = ("kill", "interrupt", "full", "source", "limits", "race", "overwrite", "resume")
OPTIONS = ["--to", "gqa", "--kv-heads", "4", "--method", "mean", "--max-shard-size", "1MB"]
CALIBRATED = ["--to", "mqa", "--group", "contiguous", "--samples", "4", "--seq-len", "32", "--resume"]
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(demo_folder(), tmp_path_factory.mktemp("source") / "model"))


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """What an undisturbed run writes, and how many calls of the system it makes."""
    import torch

    torch.set_num_threads(1)  # a fork has one thread
    parent = tmp_path_factory.mktemp("whole")
    written = {}
    for name, options in (("plain", OPTIONS), ("calibrated", CALIBRATED)):
        work = convert(source, parent / name, options)  # in this process, so that no child imports anything
        with redirect_stderr(io.StringIO()) as stderr, pytest.raises(SystemExit) as ended:
            work()
        assert (ended.value.code, stderr.getvalue()) == (0, "")
        written[name] = forked.snapshot(parent / name)
    return written


def convert(source: Path, out: Path, options: list[str]) -> Callable[[], object]:
    return lambda: main(["convert", str(source), str(out), *options, "--quiet"])


def calls_of(tmp_path: Path, work: Callable[[], object], calls: tuple[str, ...]) -> int:
    """How many of ``calls`` an undisturbed run makes."""

    def counted() -> None:
        count = forked.at_call(0, lambda: None, calls)
        try:
            work()
        finally:
            (tmp_path / "count").write_text(str(count()))

    forked.run(tmp_path / "log", counted)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    return int((tmp_path / "count").read_text())


def killing(number: int = signal.SIGKILL) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), number)


def check(end: forked.Ended, parent: Path, whole: dict[str, bytes], killed: bool = False) -> bool:
    """Whether OUT was written. Asserts that it is whole or absent, and that whatever failed has a name."""
    out = parent / "out"
    assert "Traceback" not in end.stderr, end.stderr
    assert "unexpected" not in end.stderr, end.stderr
    if out.exists():
        assert forked.snapshot(out) == whole
    else:
        assert end.status != 0
    if not out.exists() and not killed:
        # the last line is "error: ...", with only its details below it, and says where
        last = [line for line in end.stderr.splitlines() if not line.startswith("  ")][-1]
        assert last.startswith("error: "), end
        assert "the system:" not in last, end
    left = {path.name for path in parent.iterdir()} - {"out", "out.log"}
    assert killed or not left, (left, end.stderr)
    return out.exists()


@pytest.mark.parametrize("seed", range(CASES))
def test_a_fault(seed: int, source: Path, whole: Whole, tmp_path: Path) -> None:
    (tmp_path / "parent").mkdir()
    globals()[f"_{KINDS[seed % len(KINDS)]}"](random.Random(seed), source, whole, tmp_path)


def _kill(drawn: random.Random, source: Path, whole: Whole, tmp_path: Path) -> None:
    """SIGKILL at any call; the next run cleans up and writes all."""
    _struck(drawn, source, whole, tmp_path, killing(), killed=True)


def _interrupt(drawn: random.Random, source: Path, whole: Whole, tmp_path: Path) -> None:
    """Ctrl-C, a scheduler's SIGTERM or a closed terminal at any call."""
    number = drawn.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    _struck(drawn, source, whole, tmp_path, killing(number))


def _full(drawn: random.Random, source: Path, whole: Whole, tmp_path: Path) -> None:
    """A disk that is full or broken from any write on."""
    code = drawn.choice(ERRORS)

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    _struck(drawn, source, whole, tmp_path, fail, forked.WRITES, lasting=True)


def _struck(
    drawn: random.Random,
    source: Path,
    whole: Whole,
    tmp_path: Path,
    action: Callable[[], object],
    calls: tuple[str, ...] = forked.CALLS,
    killed: bool = False,
    lasting: bool = False,
) -> None:
    parent = tmp_path / "parent"
    work = convert(source, parent / "out", OPTIONS)
    number = drawn.randint(1, calls_of(tmp_path, convert(source, tmp_path / "out", OPTIONS), calls))

    def struck() -> None:
        forked.at_call(number, action, calls, lasting)
        work()

    with forked.unchanged(source):
        end = forked.run(tmp_path / "log", struck)
    if not check(end, parent, whole["plain"], killed):
        assert forked.run(tmp_path / "log", work).status == 0
        check(end, parent, whole["plain"])


def _source(drawn: random.Random, source: Path, whole: Whole, tmp_path: Path) -> None:
    """The source is cut short, lengthened, replaced, removed or rewritten at any read of it."""
    own, parent = Path(shutil.copytree(source, tmp_path / "model")), tmp_path / "parent"
    file = own / drawn.choice(["model.safetensors", "model.safetensors", "config.json", "tokenizer.json"])
    data = file.read_bytes()
    half = len(data) // 2

    def replaced() -> None:
        """By a file of the same bytes, as a second download would."""
        (own / "copy").write_bytes(data)
        os.replace(own / "copy", file)

    change = drawn.choice(
        [
            lambda: os.truncate(file, half),
            lambda: file.write_bytes(data + b" " * 64),
            lambda: file.write_bytes(data[:half] + bytes(len(data) - half)),
            file.unlink,
            replaced,
        ]
    )
    reads = ("preadv", "pread")
    number = drawn.randint(1, calls_of(tmp_path, convert(own, tmp_path / "out", OPTIONS), reads))

    def changed() -> None:
        forked.at_call(number, change, reads)
        convert(own, parent / "out", OPTIONS)()

    end = forked.run(tmp_path / "log", changed)
    assert not check(end, parent, whole["plain"])
    assert end.status == 2


def _limits(drawn: random.Random, source: Path, whole: Whole, tmp_path: Path) -> None:
    """A few more descriptors, or a few megabytes more, than the process has."""
    kind, more = drawn.choice([(resource.RLIMIT_NOFILE, 14), (resource.RLIMIT_AS, 40)])
    more = drawn.randint(0, more)

    def limited() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (more << 20)
        if kind == resource.RLIMIT_NOFILE:
            limit = len(os.listdir("/proc/self/fd")) + more
        resource.setrlimit(kind, (limit, limit))
        convert(source, tmp_path / "parent" / "out", OPTIONS)()

    written = check(forked.run(tmp_path / "log", limited), tmp_path / "parent", whole["plain"])
    assert written or more < 12 or kind != resource.RLIMIT_NOFILE


def _race(drawn: random.Random, source: Path, whole: Whole, tmp_path: Path) -> None:
    """Two to four runs for one OUT at once: one writes it, the others say why they do not."""
    parent = tmp_path / "parent"
    logs = [tmp_path / f"log{i}" for i in range(drawn.randint(2, 4))]
    for log in logs:
        log.mkdir()
    children = [forked.start(log, convert(source, parent / "out", OPTIONS)) for log in logs]
    ends = [forked.ended(log, child) for log, child in zip(logs, children, strict=True)]
    assert sorted(end.status for end in ends) == [0] + [2] * (len(ends) - 1)
    for end in ends:
        check(end, parent, whole["plain"])


def _overwrite(drawn: random.Random, source: Path, whole: Whole, tmp_path: Path) -> None:
    """SIGKILL at any call of a run with --overwrite: OUT is the old one or the new one, whole."""
    parent = tmp_path / "parent"
    old = {"config.json": b"{}", "model.safetensors": b"old", "kvfold.json": b"{}"}
    work = convert(source, parent / "out", [*OPTIONS, "--overwrite"])
    number = drawn.randint(1, calls_of(tmp_path, convert(source, tmp_path / "out", OPTIONS), forked.CALLS) + 20)
    (parent / "out").mkdir()
    for name, content in old.items():
        (parent / "out" / name).write_bytes(content)

    def struck() -> None:
        forked.at_call(number, killing())
        work()

    forked.run(tmp_path / "log", struck)
    assert forked.snapshot(parent / "out") in (old, whole["plain"])
    assert forked.run(tmp_path / "log", work).status == 0
    assert forked.snapshot(parent / "out") == whole["plain"]
    assert {path.name for path in parent.iterdir()} == {"out", "out.log"}


def _resume(drawn: random.Random, source: Path, whole: Whole, tmp_path: Path) -> None:
    """SIGKILL at any write of a calibrated run; with --resume it becomes what an unbroken run writes."""
    out = tmp_path / "parent" / "out"
    work = convert(source, out, CALIBRATED)
    number = drawn.randint(1, 60)

    def struck() -> None:
        forked.at_call(number, killing(), forked.WRITES)
        work()

    forked.run(tmp_path / "log", struck)
    assert out.exists() or forked.run(tmp_path / "log", work).status == 0
    assert forked.snapshot(out) == whole["calibrated"]
