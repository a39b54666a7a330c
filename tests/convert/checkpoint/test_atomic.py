"""Output folders: whole or absent, refusals, locks, what failures and interrupts leave behind."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from helpers import forked
from helpers.processes import PATIENCE

from kvfold.convert.checkpoint import atomic
from kvfold.convert.checkpoint.atomic import check_output, free_space_check, output_folder
from kvfold.convert.errors import InputError

WEIGHTS = "model.safetensors"


def fill(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    (folder / WEIGHTS).write_text(text * 1000)


def content(folder: Path) -> str:
    """The text a folder was filled with, once it is found whole."""
    text = (folder / "config.json").read_text()
    assert (folder / WEIGHTS).read_text() == text * 1000
    return text


def begin_and_raise(out: Path, error: type[BaseException], **options: bool) -> None:
    with output_folder(out, **options) as folder:
        fill(folder, "new")
        raise error


def failing(error: OSError) -> Callable[..., NoReturn]:
    def fail(*arguments: object, **options: object) -> NoReturn:
        raise error

    return fail


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without renameat2."""
    monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)


@pytest.fixture(params=["exchange", "aside"])
def either(request: pytest.FixtureRequest) -> None:
    if request.param == "aside":
        request.getfixturevalue("no_exchange")


@pytest.mark.usefixtures("either")
def test_appears_whole(tmp_path: Path) -> None:
    with output_folder(tmp_path / "out") as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith(".out.kvfold-")
        fill(folder, "new")
        assert not (tmp_path / "out").exists()
    assert names(tmp_path) == ["out"]
    assert content(tmp_path / "out") == "new"
    assert names(tmp_path / "out") == ["config.json", WEIGHTS]


@pytest.mark.usefixtures("either")
def test_overwrite_keeps_the_old_until_the_new_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    fill(out, "old")
    with output_folder(out, overwrite=True) as folder:
        fill(folder, "new")
        assert content(out) == "old"
    assert content(out) == "new"
    assert names(tmp_path) == ["out"]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_failures_leave_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    out = tmp_path / "out"
    with pytest.raises(error):
        begin_and_raise(out, error)
    assert names(tmp_path) == []
    out.mkdir()
    fill(out, "old")
    with pytest.raises(error):
        begin_and_raise(out, error, overwrite=True)
    assert names(tmp_path) == ["out"]
    assert content(out) == "old"


def test_an_interrupt_during_the_swap_puts_the_old_back(
    tmp_path: Path, no_exchange: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    fill(out, "old")
    real = os.rename

    def interrupted(source: Path, target: Path) -> None:
        if Path(target) == out and not out.exists() and not str(source).endswith(".old"):
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), output_folder(out, overwrite=True) as folder:
        fill(folder, "new")
    assert content(out) == "old"
    assert names(tmp_path) == ["out"]


def test_a_file_in_place_of_the_folder_made_meanwhile(tmp_path: Path, either: None) -> None:
    out = tmp_path / "out"

    def run() -> None:
        with output_folder(out) as folder:
            fill(folder, "new")
            out.mkdir()
            fill(out, "theirs")

    with pytest.raises(InputError) as caught:
        run()
    assert str(caught.value) == f"{out}: expected no such path, found one made during the run; choose another OUT"
    assert content(out) == "theirs"
    assert names(tmp_path) == ["out"]


def test_everything_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = os.fsync, atomic._renameat2

    def synced(handle: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    def renamed(source: Path, target: Path, flags: int) -> bool:
        events.append("rename")
        return rename(source, target, flags)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(atomic, "_renameat2", renamed)
    with output_folder(tmp_path / "out") as folder:
        fill(folder, "new")
    parts = [WEIGHTS, "config.json", ""]
    before = events[: events.index("rename")]
    assert sorted(before) == sorted(str(folder / part) for part in parts)
    assert events[-1] == str(tmp_path)


def refusal(out: Path, **options: object) -> str:
    """The error's text, the same before and at the start of a run; nothing is made."""
    before = set(out.parent.parent.rglob("*"))
    with pytest.raises(InputError) as checked:
        check_output(out, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError) as started, output_folder(out, **options):  # type: ignore[arg-type]
        pytest.fail("the run must not begin")
    assert str(started.value) == str(checked.value)
    assert set(out.parent.parent.rglob("*")) == before
    return str(checked.value)


def test_out_exists(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "something").touch()
    expected = f"{out}: expected no such path, found that it exists; choose another OUT or --overwrite"
    assert refusal(out) == expected
    shutil.rmtree(out)
    out.touch()
    assert refusal(out) == expected
    assert refusal(out, overwrite=True) == (f"{out}: expected a folder to overwrite, found a file; choose another OUT")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["llama/"], "found llama, which no checkpoint holds"),
        (["notes.txt"], "found notes.txt, which no checkpoint holds"),
        (["config.json"], "found no weights but config.json"),
        (["config.json", WEIGHTS, "thesis.tex"], "found thesis.tex, which no checkpoint holds"),
        (["config.json", f"{WEIGHTS}/"], "found model.safetensors, which no checkpoint holds"),
        (["config.json", WEIGHTS, "modeling.py"], "found modeling.py, which no checkpoint holds"),
        # a user's, though patterns of a checkpoint's files fit
        ([WEIGHTS, "trained.model", "training.py", "vocabulary of birds.txt"], "found trained.model, training.py, voc"),
        ([WEIGHTS, "a.jpg", "b.jpg", "c.jpg", "d.jpg"], "found a.jpg, b.jpg, c.jpg, ..., which no checkpoint holds"),
    ],
)
def test_what_is_no_checkpoint_is_not_overwritten(tmp_path: Path, names: list[str], found: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in names:
        (out / name).mkdir() if name.endswith("/") else (out / name).write_text("{}")
    refused = refusal(out, overwrite=True)
    assert refused.startswith(f"{out}: expected a checkpoint to overwrite, {found}")
    assert refused.endswith("; remove it yourself if it can go")


def test_checkpoints_and_empty_folders_are_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert check_output(out, overwrite=True) == out
    for name in ("kvfold.json", "config.json", "README.md", "tokenizer.json", "LICENSE", "modeling_kvfold.py"):
        (out / name).touch()
        assert check_output(out, overwrite=True) == out
    for name in ("spiece.model", "tokenizer.model.v3", "vocab-src.json", "layers.py", "notes.py"):
        (out / name).touch()
    (out / "config.json").write_text('{"auto_map": {"AutoModel": "layers.Model", "AutoTokenizer": [null, "x--a.B"]}}')
    (out / "kvfold.json").write_text('{"files": {"notes.py": ""}}')
    assert check_output(out, overwrite=True) == out


@pytest.mark.parametrize("overwrite", [True, False])
def test_out_and_model_inside_each_other(tmp_path: Path, overwrite: bool) -> None:
    model = tmp_path / "root" / "model"
    model.mkdir(parents=True)
    (tmp_path / "link").symlink_to(model)
    inside = f"{model / 'x'}: expected OUT outside MODEL, found it inside {model}; choose another OUT"
    assert refusal(model / "x", model=model, overwrite=overwrite) == inside
    assert refusal(tmp_path / "link" / "x", model=model, overwrite=overwrite) == inside
    assert refusal(model, model=tmp_path / "link", overwrite=overwrite) == (
        f"{model}: expected OUT apart from MODEL, found the same folder; choose another OUT"
    )
    assert refusal(tmp_path / "root", model=model, overwrite=overwrite) == (
        f"{tmp_path / 'root'}: expected OUT apart from MODEL, found MODEL {model} inside it; choose another OUT"
    )
    assert check_output(tmp_path / "root" / "model-gqa", model=model) == tmp_path / "root" / "model-gqa"


def test_a_parent_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "out", tmp_path / "file" / "further" / "out"):
        expected = f"expected a folder {tmp_path / 'file'} to write it in, found something else; choose another OUT"
        assert refusal(out) == f"{out}: {expected}"


def test_missing_parents_are_made_and_removed_after_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "one" / "two" / "out"
    with pytest.raises(ZeroDivisionError), output_folder(out):
        raise ZeroDivisionError
    assert not names(tmp_path)
    (tmp_path / "one").mkdir()
    with pytest.raises(ZeroDivisionError), output_folder(out):
        raise ZeroDivisionError
    assert names(tmp_path) == ["one"]
    with output_folder(out) as folder:
        fill(folder, "new")
    assert content(out) == "new"
    assert names(out.parent) == ["out"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert check_output(out) == out
    with output_folder(out) as folder:
        assert not names(out)
        fill(folder, "new")
    assert content(out) == "new"
    assert names(tmp_path) == ["out"]


def test_a_parent_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    if os.geteuid() == 0:  # permissions do not stop root
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    parent.chmod(0o555)
    out = parent / "out"
    assert refusal(out) == f"{out}: expected to be allowed to write in {parent}, found it not writable"
    parent.chmod(0o755)


def test_a_parent_on_a_file_system_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic.os, "open", failing(OSError(30, "Read-only file system")))
    expected = f"{tmp_path / 'out'}: expected to be able to write in {tmp_path}, found: Read-only file system"
    with pytest.raises(InputError, match=re.escape(expected)), output_folder(tmp_path / "out"):
        pytest.fail("the run must not begin")


def test_a_name_that_is_too_long_or_leads_in_circles(tmp_path: Path) -> None:
    long, circle = tmp_path / ("x" * 256), tmp_path / "circle"
    circle.symlink_to("circle")
    for path, found in ((long, "File name too long"), (circle / "out", ""), ("\0", "embedded null")):
        with pytest.raises(InputError) as caught:
            check_output(path)
        assert caught.value.message.startswith(f"{path}: expected a path to write to, found: {found}")


def test_the_longest_possible_name(tmp_path: Path) -> None:
    out = tmp_path / ("ü" * 127)
    with output_folder(out) as folder:
        fill(folder, "new")
    assert content(out) == "new"
    assert names(tmp_path) == [out.name]


def test_a_link_as_out_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    with output_folder(tmp_path / "out") as folder:
        fill(folder, "new")
    assert content(tmp_path / "disk" / "real") == "new"
    assert (tmp_path / "out").is_symlink()


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with output_folder(tmp_path / "out") as folder:
            fill(folder, "new")
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_a_live_run_is_left_alone_and_a_killed_one_cleaned_up(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def hold() -> None:
        with output_folder(out) as folder:
            (folder / "begun").touch()
            time.sleep(PATIENCE)

    child = forked.start(tmp_path, hold)
    try:
        while not (begun := list(tmp_path.glob(".out.kvfold-*/begun"))):
            time.sleep(0.01)
        expected = f"{out}: expected no other run to write it, found one at work; wait for it"
        with pytest.raises(InputError, match=re.escape(expected)), output_folder(out):
            pytest.fail("the run must not begin")
        with output_folder(tmp_path / "other") as folder:  # locks are each for one OUT
            fill(folder, "other")
        assert begun[0].exists()
    finally:
        os.kill(child, signal.SIGKILL)
        forked.ended(tmp_path, child)
    with output_folder(tmp_path / "other", overwrite=True) as folder:
        fill(folder, "other")
    assert begun[0].exists()
    with output_folder(out) as folder:
        assert not begun[0].exists()
        fill(folder, "new")
    assert names(tmp_path) == ["other", "out", "stderr", "stdout"]


def test_resuming_what_a_killed_run_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = []
    for _ in range(2):
        folder = out.with_name(f".out.kvfold-{len(killed):08x}")
        folder.mkdir()
        (folder / "begun").write_text(str(len(killed)))
        killed.append(folder)
        os.utime(folder, (time.time() + len(killed),) * 2)
    asked: list[Path] = []

    def accept(folder: Path) -> bool:
        asked.append(folder)
        return (folder / "begun").read_text() == "0"

    with output_folder(out, resume=accept) as folder:
        assert folder == killed[0]
        assert not killed[1].exists()
        fill(folder, "new")
    assert asked == [killed[1], killed[0]]  # the newest first
    assert names(out) == ["begun", "config.json", WEIGHTS]


def test_a_folder_stays_only_for_a_resume_that_takes_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        begin_and_raise(out, KeyboardInterrupt, resume=lambda folder: False)
    assert not names(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        begin_and_raise(out, KeyboardInterrupt, resume=lambda folder: True)
    (left,) = tmp_path.iterdir()
    with output_folder(out, resume=lambda folder: True) as folder:
        assert folder == left
    assert content(out) == "new"
    assert names(tmp_path) == ["out"]


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic.fcntl, "flock", failing(OSError(37, "No locks available")))
    left = tmp_path / ".out.kvfold-00000000"
    left.mkdir()
    with output_folder(tmp_path / "out") as folder:
        fill(folder, "new")
    assert content(tmp_path / "out") == "new"
    assert left.exists()  # without a lock it may be in use


def disk_with(free: int) -> Callable[[object], SimpleNamespace]:
    return lambda path: SimpleNamespace(free=free)


def test_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic.shutil, "disk_usage", disk_with(5 * 10**9))
    free_space_check(tmp_path / "out", 5 * 10**9)
    figures = "expected 5.0 GB (5000000001 bytes) free for tokens, found 5.0 GB (5000000000 bytes)"
    expected = f"{tmp_path}: too little disk space: {figures}; free some, or choose an OUT on another disk"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        free_space_check(tmp_path / "none" / "out", 5 * 10**9 + 1, "for tokens")


def test_what_a_resumed_folder_holds_counts_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic.shutil, "disk_usage", disk_with(1000))
    folder = tmp_path / ".out.kvfold-00000000"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(1 << 20))
    free_space_check(folder, 1 << 20)
    with (folder / "hole").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InputError, match="too little disk space"):
        free_space_check(folder, 1 << 30)
