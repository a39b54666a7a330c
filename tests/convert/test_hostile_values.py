"""Values, names and state files from strangers and from killed runs: one clear line, status 2."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.checkpoints import edit_json
from safetensors.torch import load_file, save_file

from kvfold.convert.data import demo_folder

POOLED = ("--to", "mqa", "--method", "mean", "--quiet")


@pytest.fixture
def model(tmp_path):
    return Path(shutil.copytree(demo_folder(), tmp_path / "model"))


def test_a_long_value_is_shortened(kvfold, model):
    for value in ("x" * 29_000, "x y " * 7_000, ["a b"] * 5_000):
        edit_json(model / "config.json", model_type=value)
        done = kvfold("inspect", model)
        assert done.returncode == 2
        assert max(map(len, done.stderr.splitlines())) < 2000


def test_control_codes_and_bytes_in_names_are_escaped(kvfold, model):
    name = os.fsdecode(b"red\x1b[31m\xff")
    os.rename(model, model.with_name(name))
    done = kvfold("inspect", model.with_name(name))
    assert done.returncode == 0
    assert r"red\x1b[31m" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_file_name_that_is_no_text_is_told_first(kvfold, model):
    shutil.copy(model / "tokenizer.json", os.fsencode(model) + b"/tokenizer\xff.json")
    done = kvfold("convert", model, model.with_name("out"), *POOLED)
    assert done.returncode == 2
    assert "is not UTF-8; rename" in done.stderr


def test_a_name_that_leaves_no_room_for_the_temporary_folder(kvfold, tmp_path):
    done = kvfold("convert", demo_folder(), tmp_path / ("o" * 240), *POOLED)
    assert done.returncode == 2
    assert "its name is too long" in done.stderr


def test_a_name_that_no_disk_can_hold(kvfold):
    done = kvfold("inspect", "x" * 5000)
    assert done.returncode == 2
    assert "File name too long" in done.stderr


def test_nan_is_told_when_it_is_copied_and_when_it_is_measured(kvfold, model):
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    done = kvfold("convert", model, model.with_name("out"), *POOLED)
    assert done.returncode == 0
    assert "NaN or infinite elements were copied" in done.stderr
    assert "in 1 tensors such as model.norm.weight" in done.stderr
    sizes = ("--samples", 1, "--seq-len", 16, "--quiet")
    done = kvfold("drift", demo_folder(), model.with_name("out"), *sizes)
    assert done.returncode == 2
    assert "out: its predictions are NaN" in done.stderr
    sizes = ("--samples", 2, "--lengths", 64, "--no-retrieval", "--quiet")
    done = kvfold("eval", demo_folder(), model.with_name("out"), *sizes)
    assert done.returncode == 2
    assert "out: its predictions are NaN" in done.stderr


def test_closed_streams_are_no_error():
    command = f"{sys.executable} -m kvfold inspect {demo_folder()} >&- 2>&-"
    assert subprocess.run(command, shell=True, check=False).returncode == 0
