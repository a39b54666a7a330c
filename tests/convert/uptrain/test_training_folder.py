"""``OUT.training``: what an interrupted run left is believed only where it is what was written."""

import re
import shutil
from dataclasses import replace

import pytest

from kvfold.convert.checkpoint.atomic import lock_output
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import InputError
from kvfold.convert.uptrain import uptraining
from kvfold.convert.uptrain.uptrain_request import UptrainRequest
from kvfold.convert.uptrain.uptraining import (
    STATE,
    draw_uptraining_tokens,
    prepare_training_folder,
    read_side_files,
    uptrain_checkpoint,
)


@pytest.fixture
def model(tiny_family, tmp_path):
    return shutil.copytree(tiny_family("llama", vocab_size=2048), tmp_path / "model")


@pytest.fixture
def request_(model, tmp_path):
    """A run that was interrupted after two checkpoints."""
    (tmp_path / "text.txt").write_text("text")
    request = UptrainRequest(model=model, out=tmp_path / "out", text=tmp_path / "text.txt")
    assert resume(request) is None
    for step in (4, 8):
        checkpoint = request.training_folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / STATE).write_text("{}")
    return request


def resume(request):
    """The name of the checkpoint to continue from."""
    checkpoint = prepare_training_folder(request, open_checkpoint(request.model))
    return None if checkpoint is None else checkpoint.name


def test_a_checkpoint_that_is_not_complete_gives_way_to_the_one_before(request_):
    shutil.copytree(
        request_.training_folder / "checkpoint-8", request_.training_folder / "checkpoint-8.bak"
    )
    assert resume(request_) == "checkpoint-8"
    (request_.training_folder / "checkpoint-8" / STATE).write_text("{")
    assert resume(request_) == "checkpoint-4"
    (request_.training_folder / "checkpoint-4" / STATE).unlink()
    assert resume(request_) is None
    assert not list(request_.training_folder.glob("checkpoint-[48]"))


@pytest.mark.parametrize("name", [".", "request.json", "checkpoint-8", f"checkpoint-8/{STATE}"])
def test_links_are_not_followed(request_, name):
    path = request_.training_folder / name
    path.rename(request_.training_folder.parent / "elsewhere")
    path.symlink_to(request_.training_folder.parent / "elsewhere")
    with pytest.raises(InputError, match="contains links"):
        resume(request_)


@pytest.mark.parametrize("changed", ["relative_lr", "text.txt", "model/config.json"])
def test_other_options_and_changed_files_are_refused_and_discard_nothing(
    request_, tmp_path, changed
):
    request = request_
    if changed == "relative_lr":
        request = replace(request_, relative_lr=0.1)
    else:
        with (tmp_path / changed).open("a") as file:
            file.write("\n")
    with pytest.raises(InputError, match="--fresh"):
        resume(request)
    assert (request_.training_folder / "checkpoint-8").exists()
    assert resume(replace(request, fresh=True)) is None


def test_a_folder_that_no_run_wrote_is_left_alone(request_):
    for content in ("[", '{"prompt": "hello"}', None):
        (request_.training_folder / "request.json").unlink()
        if content is not None:
            (request_.training_folder / "request.json").write_text(content)
        with pytest.raises(InputError, match=f"delete {re.escape(str(request_.training_folder))} "):
            resume(replace(request_, fresh=True))
    assert len(list(request_.training_folder.iterdir())) == 2


def test_a_file_in_place_of_the_folder_is_left_alone(request_):
    shutil.rmtree(request_.training_folder)
    request_.training_folder.write_text("mine")
    with pytest.raises(InputError, match="something else"):
        resume(request_)
    assert request_.training_folder.read_text() == "mine"


def test_an_interrupted_run_says_what_is_kept(request_, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(uptraining, "_run_uptraining", interrupt)
    with pytest.raises(KeyboardInterrupt) as raised:
        uptrain_checkpoint(request_)
    assert "out.training is kept" in str(raised.value.__notes__)


def test_two_runs_to_one_output(request_):
    with (
        lock_output(request_.training_folder),
        pytest.raises(InputError, match=r"out.training is being written by another run"),
    ):
        uptrain_checkpoint(request_)


def test_without_accelerate_the_extra_is_named(request_, monkeypatch):
    monkeypatch.setattr(uptraining, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'kvfold\[train\]'"):
        uptrain_checkpoint(request_)


def test_held_out_text_is_never_trained_on(request_, tmp_path):
    """And in every epoch, all of the rest is, in another order."""
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(400))))
    sizes = {"seq_len": 32, "batch_tokens": 32, "eval_sequences": 5}
    request = replace(request_, **sizes, steps=200)
    drawn = draw_uptraining_tokens(request, open_checkpoint(request.model), 2048)
    training, held_out = (list(map(tuple, tokens.tolist())) for tokens in drawn)
    epoch = len({*training})
    assert len({*held_out}) == 5
    assert not {*training} & {*held_out}
    assert 10 < epoch < 100
    assert sorted(training[:epoch]) == sorted(training[epoch : 2 * epoch])
    assert training[:epoch] != training[epoch : 2 * epoch]


@pytest.mark.parametrize("content", [b"[]", "a link"])
def test_side_files_that_cannot_be_read_or_lead_out_of_the_folder_are_refused(model, content):
    path = model / "kvfold.json"
    if content == "a link":
        (model.parent / "secret").write_text("{}")
        path.symlink_to(model.parent / "secret")
    else:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"kvfold\.json"):
        read_side_files(open_checkpoint(model))
