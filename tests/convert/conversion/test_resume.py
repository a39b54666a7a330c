"""``--resume``: runs killed with SIGKILL go on at their last finished layer and give the bytes of an unbroken run."""

import os
import signal
from unittest.mock import Mock

import pytest
import torch
from helpers import forked

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.checkpoint import writer
from kvfold.convert.checkpoint.headers import read_header
from kvfold.convert.conversion import journal, run
from kvfold.convert.data import demo_folder

OPTIONS = {
    "mqa": {"to": "mqa", "group": "contiguous", "refine": 1},
    "mla": {"to": "mla", "kv_rank": 24, "rope_dim": 4},
}


@pytest.fixture
def child(tmp_path_factory):
    """``child(options, layers)``: a conversion in a fork, and how it ended.

    It kills itself when it has noted so many layers (or, for 0, before the first), for 4 while it copies the rest.
    """
    torch.set_num_threads(1)  # a fork has one thread

    def run(options, layers):
        def work():
            note, made = journal.Journal.note, [0]

            def noted(self, notes):
                if made[0] == layers:
                    os.kill(os.getpid(), signal.SIGKILL)
                note(self, notes)
                made[0] += 1
                print("layer", len(self.notes) - 1, flush=True)

            journal.Journal.note = noted
            if layers == 4:
                writer.ShardWriter.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)
            convert_checkpoint(ConvertRequest(**options))

        return forked.run(tmp_path_factory.mktemp("log"), work)

    return run


@pytest.fixture
def request_of(tiny_reader, tmp_path):
    """``request_of("mqa")``: options of a run of some seconds that writes ``tmp_path / "out"``."""
    fixed = {"model": str(tiny_reader), "out": str(tmp_path / "out"), "samples": 4, "seq_len": 24, "quiet": True}
    return lambda name, **options: {**fixed, **OPTIONS[name], **options}


def layer_start(path, name):
    """Where the bytes of a tensor begin in a safetensors file."""
    return next(info.start for info in read_header(path, path.name).tensors if info.name == name)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


KILLS = {
    "mqa": [(2, ["layer 0", "layer 1"]), (4, ["layer 2", "layer 3"])],  # the last one while copying the rest
    "mla": [(2, ["layer 0", "layer 1"])],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_killed_run_goes_on_at_its_last_finished_layer(tmp_path, tmp_path_factory, request_of, child, name):
    options, unbroken = request_of(name, resume=True), tmp_path_factory.mktemp("unbroken") / "out"
    convert_checkpoint(ConvertRequest(**{**options, "out": str(unbroken), "resume": False}))
    for layers, made in KILLS[name]:
        killed = child(options, layers)
        assert killed.status == -signal.SIGKILL, killed.stderr
        assert killed.stdout.splitlines() == made
        assert not (tmp_path / "out").exists()
    done = child(options, 99)
    assert done.status == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.log"]
    assert contents(tmp_path / "out") == contents(unbroken)


def test_only_an_equal_request_with_resume_goes_on(tmp_path, request_of, monkeypatch, capsys):
    options = request_of("mqa", resume=True, quiet=False)
    noted = []
    note = journal.Journal.note

    def stop(self, notes):
        if len(noted) == 1:
            raise RuntimeError("enough")
        noted.append(len(self.notes))
        note(self, notes)

    monkeypatch.setattr(journal.Journal, "note", stop)
    for changes, first in (({}, 0), ({}, 1), ({"seed": 1}, 0), ({"resume": False, "seed": 1}, 0)):
        noted.clear()
        with pytest.raises(RuntimeError, match="enough"):
            convert_checkpoint(ConvertRequest(**{**options, **changes}))
        assert noted == [first]
        said = capsys.readouterr().err
        assert ("--resume: the interrupted run here used different options" in said) == (changes == {"seed": 1})
    assert not list(tmp_path.iterdir())  # without --resume nothing is left


def test_an_error_during_a_resumable_run_keeps_what_was_done(tmp_path, request_of):
    fail_at_the_end(request_of("mqa", resume=True))
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.glob(".out.kvfold-*"))) == 1
    convert_checkpoint(ConvertRequest(**request_of("mqa", resume=True)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.log"]
    assert not [name for name in contents(tmp_path / "out") if "journal" in name]


def fail_at_the_end(options):
    """Run ``options`` until all layers are finished, and fail then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "model_card", Mock(side_effect=RuntimeError("the disk went away")))
        with pytest.raises(RuntimeError, match="went away"):
            convert_checkpoint(ConvertRequest(**options))


@pytest.mark.parametrize("damage", ["bytes", "size"])
def test_finished_layers_that_were_damaged_are_made_again(tmp_path, request_of, capsys, damage):
    options = request_of("mqa", resume=True) | {"refine": 0}
    fail_at_the_end(options)
    (left,) = tmp_path.glob(".out.kvfold-*/model.safetensors")
    with left.open("r+b") as file:
        if damage == "size":
            file.truncate(left.stat().st_size - 1)
        else:
            file.seek(layer_start(left, "model.layers.2.self_attn.k_proj.weight"))
            file.write(b"\x01\x02\x03")
    capsys.readouterr()
    convert_checkpoint(ConvertRequest(**options))
    damaged = {"bytes": 2, "size": 4}[damage]
    assert capsys.readouterr().err.startswith(f"--resume: {damaged} layers are damaged; they are made again")
    convert_checkpoint(ConvertRequest(**{**options, "out": str(tmp_path / "unbroken"), "resume": False}))
    assert contents(tmp_path / "out") == contents(tmp_path / "unbroken")


def test_a_method_without_layers_to_go_on_from_says_so_and_starts(tmp_path, capsys):
    options = {"model": str(demo_folder()), "to": "mqa", "method": "mean", "resume": True}
    left = tmp_path / ".out.kvfold-00000000"
    left.mkdir()
    convert_checkpoint(ConvertRequest(**options, out=str(tmp_path / "out")))
    assert "--resume: --method mean reads no text" in capsys.readouterr().err
    assert (tmp_path / "out" / "config.json").is_file()
    assert not left.exists()
    convert_checkpoint(ConvertRequest(**options, out=str(tmp_path / "quiet"), quiet=True))
    assert capsys.readouterr().err == ""
