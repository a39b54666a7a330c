"""Output folders: whole or absent, refusals, locks, what failures and interrupts leave behind."""

import json
import os
import signal
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from helpers import forked
from helpers.processes import PATIENCE

from kvfold.convert.checkpoint import atomic
from kvfold.convert.checkpoint.atomic import (
    check_free_space,
    open_output_folder,
    replace_file,
    resolve_output_path,
)
from kvfold.convert.checkpoint.files import RECORD
from kvfold.convert.errors import InputError

WEIGHTS = "model.safetensors"


def fill(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text)
    (folder / WEIGHTS).write_text(text * 1000)
    (folder / RECORD).write_text(json.dumps({"files": {"config.json": "", WEIGHTS: ""}}))


def content(folder):
    """The text a folder was filled with, once it is found whole."""
    text = (folder / "config.json").read_text()
    assert (folder / WEIGHTS).read_text() == text * 1000
    return text


def failing(error):
    def fail(*arguments, **options):
        raise error

    return fail


def names(folder):
    return sorted(os.listdir(folder))


@pytest.fixture(params=["exchange", "aside"])
def either(request, monkeypatch):
    if request.param == "aside":  # a system without renameat2
        monkeypatch.setattr(atomic, "_exchange_folders", lambda *_: False)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("before", ["absent", "empty", "old", "missing parents"])
def test_the_new_is_there_whole_or_not_at_all(tmp_path, before, fails):
    out = tmp_path / ("one/two/out" if before == "missing parents" else "out")
    if before in ("empty", "old"):
        out.mkdir()
    if before == "old":
        fill(out, "old")
    there = names(tmp_path)
    old = forked.snapshot(tmp_path)
    with suppress(RuntimeError), open_output_folder(out, overwrite=before == "old") as folder:
        assert folder.parent == out.parent
        fill(folder, "new")
        if before == "old":
            assert content(out) == "old"
        if fails:
            raise RuntimeError
    if fails:
        assert names(tmp_path) == there
        assert forked.snapshot(tmp_path) == old
    else:
        assert content(out) == "new"
        assert names(out) == ["config.json", RECORD, WEIGHTS]
        assert names(out.parent) == ["out"]


def test_what_another_program_makes_of_out_meanwhile_is_kept(tmp_path, out, either, refused):
    with refused(), open_output_folder(out) as folder:
        fill(folder, "new")
        out.touch()
    assert out.is_file()
    out.unlink()
    with refused(), open_output_folder(out):
        fill(out, "theirs")
    assert content(out) == "theirs"
    with refused(), open_output_folder(out, overwrite=True) as folder:
        fill(folder, "new")
        (out / RECORD).unlink()
    assert content(out) == "theirs"
    assert names(tmp_path) == ["out"]


def test_everything_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []
    sync = os.fsync
    rename = os.rename

    def record_sync(handle):
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    def record_rename(source, target):
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    with open_output_folder(tmp_path / "out") as folder:
        fill(folder, "new")
    before = events[: events.index("rename")]
    assert {*before} == {str(folder / name) for name in (WEIGHTS, "config.json", RECORD, "")}
    assert events[-1] == str(tmp_path)


def refusal(out, **options):
    """The error's text, the same before and at the start of a run; nothing is made."""
    before = set(out.parent.parent.rglob("*"))
    with pytest.raises(InputError) as checked:
        resolve_output_path(out, **options)
    with pytest.raises(InputError) as started, open_output_folder(out, **options):
        pytest.fail("the run must not begin")
    assert str(started.value) == str(checked.value)
    assert set(out.parent.parent.rglob("*")) == before
    return str(checked.value)


def test_out_exists(out):
    out.touch()
    assert "choose another OUT" in refusal(out, overwrite=True)
    out.unlink()
    out.mkdir()
    assert resolve_output_path(out) == out
    fill(out, "old")
    assert "--overwrite" in refusal(out)
    assert resolve_output_path(out, overwrite=True) == out
    with pytest.raises(InputError, match="or remove it"):
        resolve_output_path(out, overwrite=None)


@pytest.mark.parametrize(
    "record", [None, "link", "inner link", "", "[]", '{"files": {}}', '{"files": {"a": 1}}']
)
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_checkpoint_that_kvfold_did_not_write_is_never_replaced(tmp_path, out, record, overwrite):
    fill(out, "trained")
    moved = out / ".gitattributes" if record == "inner link" else tmp_path / "record"
    (out / RECORD).rename(moved)
    if record in ("link", "inner link"):
        (out / RECORD).symlink_to(moved)
    elif record is not None:
        (out / RECORD).write_text(record)
    for model in (None, "owner/name"):
        text = refusal(out, overwrite=overwrite, model=model)
        assert "choose another OUT" in text
        assert "--overwrite" not in text


@pytest.mark.parametrize("name", ["notes.txt", ".git/HEAD", "sub/thesis.tex", "link"])
def test_files_of_others_in_a_checkpoint_are_not_lost(out, name):
    fill(out, "old")
    (out / ".gitattributes").touch()
    assert resolve_output_path(out, overwrite=True) == out
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).symlink_to(out.parent) if name == "link" else (out / name).touch()
    assert name in refusal(out, overwrite=True)


@pytest.mark.parametrize("overwrite", [True, False])
def test_out_and_model_inside_each_other(tmp_path, overwrite):
    model = tmp_path / "root" / "model"
    model.mkdir(parents=True)
    (tmp_path / "link").symlink_to(model)
    for out in (model / "x", tmp_path / "link" / "x", model, tmp_path / "root"):
        refusal(out, model=tmp_path / "link", overwrite=overwrite)
    beside = tmp_path / "root" / "model-gqa"
    assert resolve_output_path(beside, model=model) == beside


def test_parents_that_cannot_hold_a_folder(tmp_path, monkeypatch, refused):
    (tmp_path / "file").touch()
    refusal(tmp_path / "file" / "further" / "out")
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: False)  # permissions do not stop root
        refusal(tmp_path / "out")
    (tmp_path / "circle").symlink_to("circle")
    for path in (tmp_path / ("x" * 256), tmp_path / "circle" / "out", "\0"):
        with refused(), open_output_folder(path):
            pytest.fail("the run must not begin")
    monkeypatch.setattr(atomic.os, "open", failing(OSError(30, "Read-only file system")))
    with refused(), open_output_folder(tmp_path / "out"):
        pytest.fail("the run must not begin")


def test_a_link_and_the_umask(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    old = os.umask(0o027)
    try:
        with open_output_folder(tmp_path / "link") as folder:
            fill(folder, "new")
    finally:
        os.umask(old)
    assert content(tmp_path / "disk" / "real") == "new"
    assert (tmp_path / "link").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "link").is_symlink()


def test_a_live_run_is_left_alone_and_a_killed_one_cleaned_up(tmp_path, out, refused):
    def hold():
        with open_output_folder(out) as folder:
            (folder / "begun").touch()
            time.sleep(PATIENCE)

    child = forked.start(tmp_path, hold)
    try:
        while not (begun := list(tmp_path.glob(".out.kvfold-*/begun"))):
            time.sleep(0.01)
        with refused(), open_output_folder(out):
            pytest.fail("the run must not begin")
        assert begun[0].exists()
    finally:
        os.kill(child, signal.SIGKILL)
        forked.ended(tmp_path, child)
    with open_output_folder(tmp_path / "other"):  # locks are each for one OUT
        assert begun[0].exists()
    with open_output_folder(out) as folder:
        assert not begun[0].exists()
        fill(folder, "new")
    assert names(tmp_path) == ["other", "out", "stderr", "stdout"]


def test_resuming_what_a_killed_run_left(tmp_path, out):
    """The newest that is taken."""
    killed = [out.with_name(f".out.kvfold-{number:08x}") for number in range(3)]
    for number, folder in enumerate(killed):
        folder.mkdir()
        (folder / "begun").write_text(str(number))
        os.utime(folder, (time.time() + number,) * 2)
    with open_output_folder(
        out, resume=lambda folder: (folder / "begun").read_text() != "2"
    ) as folder:
        assert folder == killed[1]
        assert not killed[2].exists()
        fill(folder, "new")
    assert names(tmp_path) == ["out"]
    assert names(out) == ["begun", "config.json", RECORD, WEIGHTS]


def test_file_systems_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.fcntl, "flock", failing(OSError(37, "No locks available")))
    left = tmp_path / ".out.kvfold-00000000"
    left.mkdir()
    with open_output_folder(tmp_path / "out") as folder:
        fill(folder, "new")
    assert content(tmp_path / "out") == "new"
    assert left.exists()  # without a lock it may be in use


def test_free_space(tmp_path, monkeypatch, refused):
    """What a resumed folder holds counts as room, but for holes."""
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    check_free_space(tmp_path, 1000)
    with refused():
        check_free_space(tmp_path, 1001)
    (tmp_path / "weights").write_bytes(bytes(1 << 20))
    check_free_space(tmp_path, 1 << 20)
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InputError, match="too little disk space"):
        check_free_space(tmp_path, 1 << 30)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "state.pt"
    path.write_text("old")
    with suppress(OSError), replace_file(path) as new:
        new.write_text("ha")
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old"
    with replace_file(path) as new:
        new.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
