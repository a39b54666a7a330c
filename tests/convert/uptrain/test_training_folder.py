"""``OUT.training``: what an interrupted run left is believed only where it is what was written."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from kvfold.convert.checkpoint.atomic import output_lock
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import InputError
from kvfold.convert.uptrain import uptraining
from kvfold.convert.uptrain.training_folder import STATE, resume_or_start
from kvfold.convert.uptrain.uptrain_request import UptrainRequest
from kvfold.convert.uptrain.uptraining import uptrain_checkpoint


@pytest.fixture
def model(tiny_family, tmp_path):
    return shutil.copytree(tiny_family("llama"), tmp_path / "model")


@pytest.fixture
def request_(model, tmp_path):
    """A run that was interrupted after two checkpoints."""
    (tmp_path / "text.txt").write_text("text")
    request = UptrainRequest(model=model, out=tmp_path / "out", text=tmp_path / "text.txt")
    assert resume(request) is None
    for step in (4, 8):
        checkpoint = request.work / f"checkpoint-{step}"
        checkpoint.mkdir()
        save_file({"a": torch.ones(9)}, checkpoint / "model.safetensors")
        torch.save({}, checkpoint / "optimizer.pt")
        (checkpoint / STATE).write_text("{}")
    return request


def resume(request):
    """The name of the checkpoint to continue from."""
    checkpoint = resume_or_start(request, open_checkpoint(request.model))
    return None if checkpoint is None else checkpoint.name


@pytest.mark.parametrize("name", [STATE, "model.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(request_, capsys, name, size):
    file = request_.work / "checkpoint-8" / name
    file.write_bytes(file.read_bytes()[:size])
    assert resume(request_) == "checkpoint-4"
    assert "discarding checkpoint-8, which is damaged" in capsys.readouterr().err


def test_without_a_sound_checkpoint_the_run_starts_over(request_):
    for step in (4, 8):
        (request_.work / f"checkpoint-{step}" / STATE).unlink()
    assert resume(request_) is None
    assert not list(request_.work.glob("checkpoint-*"))


@pytest.mark.parametrize(
    "name", [".", "request.json", "checkpoint-8", "checkpoint-8/model.safetensors"]
)
def test_links_are_not_followed(request_, name):
    path = request_.work / name
    path.rename(request_.work.parent / "elsewhere")
    path.symlink_to(request_.work.parent / "elsewhere")
    with pytest.raises(InputError, match="is a link"):
        resume(request_)


@pytest.mark.parametrize("name", ["text.txt", "model/config.json"])
def test_changed_files_and_a_fresh_run_start_over(request_, tmp_path, capsys, name):
    assert resume(request_) == "checkpoint-8"
    with (tmp_path / name).open("a") as file:
        file.write("\n")
    assert resume(request_) is None
    assert "changed since then" in capsys.readouterr().err
    assert resume(replace(request_, fresh=True)) is None


def test_other_options_are_refused_and_discard_nothing(request_):
    with pytest.raises(InputError, match="--fresh") as raised:
        resume(replace(request_, relative_lr=0.1))
    assert raised.value.field == "relative_lr"
    assert resume(request_) == "checkpoint-8"


def test_a_folder_that_no_run_wrote_is_left_alone(request_):
    (request_.work / "request.json").write_bytes(b"[")
    with pytest.raises(InputError, match=r"request.json: not valid JSON"):
        resume(request_)
    (request_.work / "request.json").write_text('{"prompt": "hello"}')
    with pytest.raises(InputError, match="contains other files"):
        resume(request_)
    (request_.work / "request.json").unlink()
    with pytest.raises(InputError, match="contains other files"):
        resume(replace(request_, fresh=True))
    assert len(list(request_.work.iterdir())) == 2


def test_two_runs_to_one_output(request_):
    with (
        output_lock(request_.work),
        pytest.raises(InputError, match=r"out.training is being written by another run"),
    ):
        uptrain_checkpoint(request_)


@pytest.mark.parametrize("content", [b"[]", b'{"a": 1}}', "a link", "a folder"])
def test_side_files_that_cannot_be_read_or_lead_out_of_the_folder_are_refused(model, content):
    path = model / "kvfold.json"
    if content == "a folder":
        path.mkdir()
    elif content == "a link":
        (model.parent / "secret").write_text("{}")
        path.symlink_to(model.parent / "secret")
    else:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"kvfold\.json"):
        uptraining._read_side_files(open_checkpoint(model))
