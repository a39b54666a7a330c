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
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace

import pytest
from faults.conftest import CASES
from helpers import forked

from kvfold.convert.cli import main
from kvfold.convert.data import demo_folder

pytestmark = [pytest.mark.faults, pytest.mark.slow]
KINDS = ("kill", "interrupt", "full", "source", "descriptors", "memory", "race", "overwrite", "resume")
OPTIONS = ["--to", "gqa", "--kv-heads", "4", "--method", "mean", "--max-shard-size", "1MB"]
CALIBRATED = ["--to", "mqa", "--group", "contiguous", "--samples", "4", "--seq-len", "32", "--resume"]
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(demo_folder(), tmp_path_factory.mktemp("source") / "model"))


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
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


def check(end: forked.Ended, parent: Path, whole: dict[str, bytes], killed: bool = False) -> bool:
    """Whether OUT was written. Asserts that it is whole or absent, and that whatever failed has a name."""
    out = parent / "out"
    assert "Traceback" not in end.stderr, end.stderr
    assert "unexpected" not in end.stderr, end.stderr
    if out.exists():
        assert forked.snapshot(out) == whole
    else:
        assert end.status != 0
        assert killed or _named(end.stderr), end
    left = {path.name for path in parent.iterdir()} - {"out", "out.log"}
    assert killed or not left, (left, end.stderr)
    return out.exists()


def _named(stderr: str) -> bool:
    """Whether the end of stderr is one line ``error: ...``, with only its details below it, and says where."""
    lines = [line for line in stderr.splitlines() if not line.startswith("  ")]
    return lines[-1].startswith("error: ") and "the system:" not in lines[-1]


@pytest.mark.parametrize("seed", range(CASES))
def test_a_fault(seed: int, source: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    drawn = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    globals()[f"_{kind}"](drawn, source, whole, tmp_path)


def _kill(drawn: random.Random, source: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    """SIGKILL at any call; the next run cleans up and writes all."""
    _struck(drawn, source, whole, tmp_path, lambda: os.kill(os.getpid(), signal.SIGKILL), killed=True)


def _interrupt(drawn: random.Random, source: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    """Ctrl-C, a scheduler's SIGTERM or a closed terminal at any call."""
    number = drawn.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    _struck(drawn, source, whole, tmp_path, lambda: os.kill(os.getpid(), number))


def _full(drawn: random.Random, source: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    """A disk that is full or broken from any write on: a tmpfs where one can be mounted, or failing writes."""
    if drawn.random() < 0.5 and _small_disk(drawn, source, whole["plain"], tmp_path):
        return
    code = drawn.choice(ERRORS)

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    _struck(drawn, source, whole, tmp_path, fail, forked.WRITES, lasting=True)


def _small_disk(drawn: random.Random, source: Path, whole: dict[str, bytes], tmp_path: Path) -> bool:
    """A disk that turns out too small after the check of its free space; False where no tmpfs can be mounted."""
    parent = tmp_path / "small"
    parent.mkdir()
    pages = sum(len(data) // 4096 + 1 for data in whole.values())  # folders and links take pages too
    size = drawn.choice([drawn.randint(1, pages), pages - drawn.randint(0, 8)])  # anywhere, or among the side files
    mount = ["mount", "-t", "tmpfs", "-o", f"nr_blocks={size}", "tmpfs", str(parent)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        return False
    work = convert(source, parent / "out", OPTIONS)

    def unaware() -> None:
        shutil.disk_usage = lambda path: SimpleNamespace(free=1 << 40)
        work()

    try:
        check(forked.run(tmp_path / "log", unaware), parent, whole)
    finally:
        subprocess.run(["umount", str(parent)], check=True)
    return True


def _struck(
    drawn: random.Random,
    source: Path,
    whole: dict[str, dict[str, bytes]],
    tmp_path: Path,
    action: Callable[[], object],
    calls: tuple[str, ...] = forked.CALLS,
    killed: bool = False,
    lasting: bool = False,
) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
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
    assert {path.name for path in parent.iterdir()} == {"out", "out.log"} or (parent / "out").exists()


def _source(drawn: random.Random, source: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    """The source is written to, cut short, replaced or removed at any read of it."""
    own, parent = Path(shutil.copytree(source, tmp_path / "model")), tmp_path / "parent"
    parent.mkdir()
    file = own / drawn.choice(["model.safetensors", "model.safetensors", "config.json", "tokenizer.json"])
    change = drawn.choice([_cut, _grown, _replaced, _removed, _rewritten])
    reads = ("preadv", "pread")
    number = drawn.randint(1, calls_of(tmp_path, convert(own, tmp_path / "out", OPTIONS), reads))

    def changed() -> None:
        forked.at_call(number, lambda: change(file), reads)
        main(["convert", str(own), str(parent / "out"), *OPTIONS, "--quiet"])

    end = forked.run(tmp_path / "log", changed)
    assert not check(end, parent, whole["plain"])
    assert end.status == 2


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _grown(file: Path) -> None:
    with file.open("ab") as handle:
        handle.write(b" " * 64)


def _replaced(file: Path) -> None:
    """By a file of the same bytes, as a second download would."""
    copy = file.with_name("copy")
    shutil.copyfile(file, copy)
    os.replace(copy, file)


def _removed(file: Path) -> None:
    file.unlink()


def _rewritten(file: Path) -> None:
    """In place, to the same length."""
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def _descriptors(drawn: random.Random, source: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    """A few more descriptors than the process has open."""
    more = drawn.randint(0, 14)

    def limited() -> None:
        count = len(os.listdir("/proc/self/fd")) + more
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))
        main(["convert", str(source), str(parent / "out"), *OPTIONS, "--quiet"])

    parent = tmp_path / "parent"
    parent.mkdir()
    written = check(forked.run(tmp_path / "log", limited), parent, whole["plain"])
    assert written or more < 12


def _memory(drawn: random.Random, source: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    """A few megabytes more than the process has."""
    more = drawn.randint(0, 40) << 20

    def limited() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        main(["convert", str(source), str(parent / "out"), *OPTIONS, "--quiet"])

    parent = tmp_path / "parent"
    parent.mkdir()
    check(forked.run(tmp_path / "log", limited), parent, whole["plain"])


def _race(drawn: random.Random, source: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    """Two to four runs for one OUT at once: one writes it, the others say why they do not."""
    parent = tmp_path / "parent"
    parent.mkdir()
    logs = [tmp_path / f"log{i}" for i in range(drawn.randint(2, 4))]
    for log in logs:
        log.mkdir()
    children = [forked.start(log, convert(source, parent / "out", OPTIONS)) for log in logs]
    ends = [forked.ended(log, child) for log, child in zip(logs, children, strict=True)]
    assert sorted(end.status for end in ends) == [0] + [2] * (len(ends) - 1)
    for end in ends:
        check(end, parent, whole["plain"])


def _overwrite(drawn: random.Random, source: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    """SIGKILL at any call of a run with --overwrite: OUT is the old one or the new one, whole."""
    parent = tmp_path / "parent"
    old = {"config.json": b"{}", "model.safetensors": b"old", "kvfold.json": b"{}"}
    work = convert(source, parent / "out", [*OPTIONS, "--overwrite"])
    number = drawn.randint(1, calls_of(tmp_path, convert(source, tmp_path / "out", OPTIONS), forked.CALLS) + 20)
    (parent / "out").mkdir(parents=True)
    for name, content in old.items():
        (parent / "out" / name).write_bytes(content)

    def struck() -> None:
        forked.at_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        work()

    forked.run(tmp_path / "log", struck)
    assert forked.snapshot(parent / "out") in (old, whole["plain"])
    assert forked.run(tmp_path / "log", work).status == 0
    assert forked.snapshot(parent / "out") == whole["plain"]
    assert {path.name for path in parent.iterdir()} == {"out", "out.log"}


def _resume(drawn: random.Random, source: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    """SIGKILL at any write of a calibrated run; with --resume it becomes what an unbroken run writes."""
    parent = tmp_path / "parent"
    parent.mkdir()
    work = convert(source, parent / "out", CALIBRATED)
    number = drawn.randint(1, 60)

    def struck() -> None:
        forked.at_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL), forked.WRITES)
        work()

    forked.run(tmp_path / "log", struck)
    end = forked.run(tmp_path / "log", work) if not (parent / "out").exists() else None
    assert end is None or end.status == 0, end
    assert forked.snapshot(parent / "out") == whole["calibrated"]
