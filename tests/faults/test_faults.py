"""Runs that are killed, starved and lied to: OUT is absent, as it was, or what an undisturbed run
writes.

``python -m pytest -m faults tests/faults`` runs 15 cases, ``KVFOLD_CASES=600`` before it as many.
Each is a forked ``kvfold convert`` or ``kvfold uptrain`` in which one call of the system, drawn
from a seed, is killed or interrupted, fails as on a full or broken disk, or finds the source
changed; or which is resumed with another request, has few descriptors, little memory, or a second
run beside it.
"""

import errno
import io
import os
import random
import resource
import shutil
import signal
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path

import pytest
from helpers import forked

from kvfold.convert.cli import main

Whole = dict[str, dict[str, bytes]]
Calls = tuple[str, ...]

pytestmark = [pytest.mark.faults, pytest.mark.slow]
KINDS = 15  # of faults, that share the cases
seeds = pytest.mark.parametrize(
    "seed", range(-(-int(os.environ.get("KVFOLD_CASES", "15")) // KINDS))
)
CALIBRATED = "--to mqa --group contiguous --samples 4 --seq-len 32"
RUNS = {
    "plain": "--to gqa --kv-heads 4 --method mean --max-shard-size 500KB",
    "calibrated": CALIBRATED,
    "polished": f"{CALIBRATED} --polish 3 --repeat-text",
    "refined": f"{CALIBRATED} --refine 1",
}
TRAINING = "--seq-len 32 --batch-tokens 64 --steps 2 --save-every 1 --eval-every 0"
READS = ("preadv", "pread")
STAGES = ("plain", "calibrated", "polished", "trained")


@pytest.fixture(scope="module")
def source(tiny_reader, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    (folder / "text.txt").write_text(
        "".join(f"Row {row} has {row * row} and no more.\n" for row in range(300))
    )
    return Path(shutil.copytree(tiny_reader, folder / "model"))


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The files that an undisturbed run writes."""

    parent = tmp_path_factory.mktemp("whole")
    written = {}
    for name in (*RUNS, "trained"):
        (parent / name).mkdir()
        work = run_of(
            name, source, parent / name / "out"
        )  # in this process, so that no child imports anything
        with redirect_stderr(io.StringIO()) as stderr, pytest.raises(SystemExit) as ended:
            work()
        assert ended.value.code == 0
        assert {line.split(":")[0] for line in stderr.getvalue().splitlines()} <= {"warning"}
        written[name] = forked.snapshot(parent / name / "out")
    return written


@pytest.fixture(scope="module")
def count_of(source, whole, tmp_path_factory):
    """The number of some calls that an undisturbed run makes."""

    @cache
    def count_of(calls, name="plain"):
        folder = tmp_path_factory.mktemp("counted")

        def counted():
            count = forked.at_call(0, lambda: None, calls)
            try:
                run_of(name, source, folder / "out")()
            finally:
                (folder / "count").write_text(str(count()))

        forked.run(folder, counted)
        return int((folder / "count").read_text())

    return count_of


@pytest.fixture
def parent(tmp_path):
    (tmp_path / "parent").mkdir()
    return tmp_path / "parent"


def convert(source, out, options=RUNS["plain"]):
    return lambda: main(["convert", str(source), str(out), *options.split(), "--quiet"])


def run_of(name, source, out):
    """A run by its name: ``trained`` is ``kvfold uptrain``, the others are conversions."""
    text = ["--text", str(source.parent / "text.txt"), "--quiet"]
    if name == "trained":
        return lambda: main(["uptrain", str(source), str(out), *TRAINING.split(), *text])
    return convert(source, out, RUNS[name])


def struck(log, work, at, action, calls):
    """A run with ``action`` before call number ``at``; where that is a write, before every later
    one too.
    """

    def run():
        forked.at_call(at, action, calls, lasting=calls == forked.WRITES)
        work()

    return forked.run(log, run)


def check(
    end,
    parent,
    whole,
    killed=False,
    kept=False,
):
    """True if OUT was written. Asserts that it is whole or absent, that whatever failed has a name,
    and that nothing else is left unless the run was killed or its work may be ``kept``.
    """
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
    left = {path.name for path in parent.iterdir()} - {"out"}
    assert killed or kept or not left, (left, end.stderr)
    return out.exists()


@seeds
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[(kind, name) for kind in ("kill", "full") for name in STAGES],
        ("interrupt", "plain"),
    ],
)
def test_a_run_struck_at_any_call(seed, kind, name, source, whole, count_of, tmp_path, parent):
    """Killed, interrupted, or on a disk that is full or broken from then on, in every stage; the
    next run cleans up or continues, and writes all.
    """
    drawn = random.Random(seed)
    work = run_of(name, source, parent / "out")
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    number = drawn.choice(signals) if kind == "interrupt" else signal.SIGKILL
    code = drawn.choice([errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])

    def strike():
        if kind != "full":
            os.kill(os.getpid(), number)
        raise OSError(code, os.strerror(code))

    calls = forked.CALLS if name == "plain" and kind != "full" else forked.WRITES
    before = forked.snapshot(source)
    at = drawn.randint(1, count_of(calls, name))
    end = struck(tmp_path / "log", work, at, strike, calls)
    assert forked.snapshot(source) == before
    if not check(end, parent, whole[name], kind == "kill", kept=name != "plain"):
        again = forked.run(tmp_path / "log", work)
        assert again.status == 0
        assert check(again, parent, whole[name])


@seeds
def test_a_killed_run_is_resumed_with_another_request(
    seed, source, whole, count_of, tmp_path, parent
):
    """Nothing of the first request is in what the second one writes."""
    first, second = random.Random(seed).sample([name for name in RUNS if name != "plain"], 2)
    at = random.Random(seed).randint(1, count_of(forked.WRITES, first))

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    struck(tmp_path / "log", run_of(first, source, parent / "out"), at, kill, forked.WRITES)
    if not (parent / "out").exists():
        again = run_of(second, source, parent / "out")
        end = forked.run(tmp_path / "log", again)
        if end.status != 0:  # where finished layers wait
            assert "--fresh" in end.stderr, end
            again = convert(source, parent / "out", f"{RUNS[second]} --fresh")
            assert forked.run(tmp_path / "log", again).status == 0
        assert forked.snapshot(parent / "out") == whole[second]


@seeds
@pytest.mark.parametrize("name", ["plain", "polished"])
def test_a_source_that_changes_at_any_read(seed, name, source, whole, count_of, tmp_path, parent):
    """It is cut short, lengthened, rewritten, removed or replaced."""
    drawn = random.Random(seed)
    own = Path(shutil.copytree(source, tmp_path / "model"))
    file = own / drawn.choice(
        ["model.safetensors", "model.safetensors", "config.json", "tokenizer.json"]
    )
    data = file.read_bytes()
    half = len(data) // 2

    def replaced():
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
    # of a polished run the reads that come after those of a calibrated one
    at = drawn.randint(
        1 if name == "plain" else count_of(READS, "calibrated"), count_of(READS, name)
    )
    end = struck(tmp_path / "log", run_of(name, own, parent / "out"), at, change, READS)
    assert not check(end, parent, whole[name], kept=name != "plain")
    assert end.status == 2


@seeds
@pytest.mark.parametrize(
    "kind", [resource.RLIMIT_NOFILE, resource.RLIMIT_AS], ids=["descriptors", "memory"]
)
def test_a_few_more_descriptors_or_megabytes_than_the_process_has(
    seed, kind, source, whole, tmp_path, parent
):
    more = random.Random(seed).randint(0, 14 if kind == resource.RLIMIT_NOFILE else 40)

    def limited():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (more << 20)
        if kind == resource.RLIMIT_NOFILE:
            limit = len(os.listdir("/proc/self/fd")) + more
        resource.setrlimit(kind, (limit, limit))
        convert(source, parent / "out")()

    written = check(forked.run(tmp_path / "log", limited), parent, whole["plain"])
    assert written or more < 12 or kind != resource.RLIMIT_NOFILE


@seeds
def test_runs_for_one_out_at_once(seed, source, whole, tmp_path, parent):
    """One writes it, the others say why they do not."""
    logs = [tmp_path / f"log{i}" for i in range(2 + seed % 3)]
    for log in logs:
        log.mkdir()
    children = [forked.start(log, convert(source, parent / "out")) for log in logs]
    ends = [forked.ended(log, child) for log, child in zip(logs, children, strict=True)]
    assert sorted(end.status for end in ends) == [0] + [2] * (len(ends) - 1)
    for end in ends:
        check(end, parent, whole["plain"])
