"""What an interrupted run left is believed only where it is what was written; without a run: folders made by hand."""

import json
import os
import shutil

import pytest

from kvfold.convert.checkpoint.atomic import output_lock
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError
from kvfold.convert.uptrain.request import UptrainRequest
from kvfold.convert.uptrain.resume import COMPLETE, last_checkpoint, mark_complete, read_log
from kvfold.convert.uptrain.run import uptrain_checkpoint


@pytest.fixture
def request_(tmp_path):
    request = UptrainRequest(model="m", out=str(tmp_path / "out"), text="t", resume=True)
    request.work.mkdir()
    (request.work / "request.json").write_text(json.dumps(request.result_options()))
    for step in (4, 8):
        checkpoint = request.work / f"checkpoint-{step}"
        (checkpoint / "optimizer").mkdir(parents=True)
        for name in ("model.safetensors", "trainer_state.json", "optimizer/0.distcp"):
            (checkpoint / name).write_bytes(os.urandom(100))
        mark_complete(checkpoint)
    return request


def newest(request):
    found = last_checkpoint(request)
    return None if found is None else found.name


@pytest.mark.parametrize("name", ["optimizer/0.distcp", COMPLETE])
@pytest.mark.parametrize("damage", ["cut", "empty", "other bytes", "removed", "folder", "link"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(request_, capsys, name, damage):
    file = request_.work / "checkpoint-8" / name
    data = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage == "link":
        (request_.work.parent / "elsewhere").write_bytes(data)
        file.symlink_to(request_.work.parent / "elsewhere")
    elif damage != "removed":
        file.write_bytes({"cut": data[:-1], "empty": b"", "other bytes": b"\xff" + data[1:]}[damage])
    expected = "checkpoint-8" if (name, damage) == (COMPLETE, "link") else "checkpoint-4"
    assert newest(request_) == expected
    told = capsys.readouterr().err
    half_written = name == COMPLETE and damage == "removed"  # as a killed run leaves it
    assert ("--resume: checkpoint-8 is damaged and left out" in told) == (
        expected == "checkpoint-4" and not half_written
    )


def test_without_a_sound_checkpoint_the_run_starts_over(request_):
    assert newest(request_) == "checkpoint-8"
    for step in (4, 8):
        (request_.work / f"checkpoint-{step}" / "model.safetensors").unlink()
    assert newest(request_) is None
    shutil.copytree(request_.work / "checkpoint-4", request_.work / "checkpoint-x")
    assert newest(request_) is None


@pytest.mark.parametrize("content", [b"", b"[", b"\xff", b"3", b"[" * 100_000])
def test_options_that_cannot_be_read(request_, content):
    (request_.work / "request.json").write_bytes(content)
    with pytest.raises(InputError, match=r"request.json(:| must)"):
        last_checkpoint(request_)


@pytest.mark.parametrize(
    "line", [b"{", b"\xff\xfe", b"3", b"null", b'{"loss": 3}', b'{"step": 2, "tokens": 1, "loss": "x"}', b"[" * 100_000]
)
def test_a_log_ends_where_it_is_damaged(tmp_path, line):
    row = {"step": 1, "tokens": 10, "loss": 3.5}
    (tmp_path / "log.jsonl").write_bytes(json.dumps(row).encode() + b"\n" + line + b"\n" + json.dumps(row).encode())
    assert read_log(tmp_path / "log.jsonl") == [row]


def test_two_runs_to_one_output(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    request = UptrainRequest(model=str(demo_folder()), out=str(tmp_path / "out"), text=str(tmp_path / "text.txt"))
    expected = "out.training is being written by another run; wait for it"
    with output_lock(request.work), pytest.raises(InputError, match=expected):
        uptrain_checkpoint(request)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
