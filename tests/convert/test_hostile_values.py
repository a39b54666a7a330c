"""Values, names and state files from strangers and from killed runs: one clear line, status 2."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.checkpoints import edit_json
from safetensors.torch import load_file, save_file

from kvfold.convert import cli
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import explain_system_error

POOLED = ("--to", "mqa", "--method", "mean", "--quiet")


@pytest.fixture
def kvfold(capfd):
    """Runs a command line in this process: its status, stdout and stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main(list(map(str, arguments)))
        return caught.value.code, *capfd.readouterr()

    return run


@pytest.fixture
def model(tmp_path):
    return Path(shutil.copytree(demo_folder(), tmp_path / "model"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_labels", 1 << 31),
        ("intermediate_size", 1 << 40),
        ("max_position_embeddings", 1 << 40),
        ("num_key_value_heads", 1 << 31),
        ("dtype", "Tensor"),
        ("torch_dtype", "__doc__"),
    ],
)
def test_sizes_and_dtypes_are_bounded_where_the_config_is_read(kvfold, model, key, value):
    edit_json(model / "config.json", text_config={key: value})
    status, _, stderr = kvfold("inspect", model)
    assert status == 2
    assert f"{key} is {value!r}, but must be " in stderr


def test_a_long_value_is_shortened(kvfold, model):
    for value in ("x" * 29_000, "x y " * 7_000, ["a b"] * 5_000):
        edit_json(model / "config.json", model_type=value)
        status, _, stderr = kvfold("inspect", model)
        assert status == 2
        assert max(map(len, stderr.splitlines())) < 2000


def test_control_codes_and_bytes_in_names_are_escaped(kvfold, model):
    name = os.fsdecode(b"red\x1b[31m\xff")
    os.rename(model, model.with_name(name))
    status, stdout, _ = kvfold("inspect", model.with_name(name))
    assert status == 0
    assert r"red\x1b[31m" in stdout
    assert "\x1b" not in stdout


def test_a_file_name_that_is_no_text_is_told_first(kvfold, model):
    shutil.copy(model / "tokenizer.json", os.fsencode(model) + b"/tokenizer\xff.json")
    status, _, stderr = kvfold("convert", model, model.with_name("out"), *POOLED)
    assert status == 2
    assert "is not UTF-8; rename" in stderr


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (f"to = 0x{'f' * 9000}", "to must be"),
        (f"kv_rank = 0x{'f' * 9000}", "kv-rank must be"),
        ("aa = 1\nbb = 2", "unknown key"),
        ('to = "mqa"\nmethod = "antigravity:x"', "would import a module"),
        ('to = "mqa"\nobjective = "this:x"', "would import a module"),
    ],
)
def test_a_recipe_with_such_a_value_is_refused(kvfold, tmp_path, recipe, said):
    (tmp_path / "r.toml").write_text(recipe)
    line = ("convert", demo_folder(), tmp_path / "out", "--recipe", tmp_path / "r.toml")
    status, _, stderr = kvfold(*line)
    assert status == 2
    assert said in stderr
    assert not {"antigravity", "this"} & sys.modules.keys()


def test_a_name_that_leaves_no_room_for_the_temporary_folder(kvfold, tmp_path):
    status, _, stderr = kvfold("convert", demo_folder(), tmp_path / ("o" * 240), *POOLED)
    assert status == 2
    assert "its name is too long" in stderr


def test_nan_is_told_when_it_is_copied_and_when_it_is_measured(kvfold, model):
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    status, _, stderr = kvfold("convert", model, model.with_name("out"), *POOLED)
    assert status == 0
    assert "NaN or infinite elements were copied" in stderr
    assert "in 1 tensors such as model.norm.weight" in stderr
    sizes = ("--samples", 1, "--seq-len", 16, "--quiet")
    status, _, stderr = kvfold("drift", demo_folder(), model.with_name("out"), *sizes)
    assert status == 2
    assert "out: its predictions are NaN" in stderr
    sizes = ("--samples", 2, "--lengths", 64, "--no-retrieval", "--quiet")
    status, _, stderr = kvfold("eval", demo_folder(), model.with_name("out"), *sizes)
    assert status == 2
    assert "out: its predictions are NaN" in stderr


def test_closed_streams_are_no_error():
    command = f"{sys.executable} -m kvfold inspect {demo_folder()} >&- 2>&-"
    assert subprocess.run(command, shell=True, check=False).returncode == 0


def test_a_full_disk_in_torch_save_is_explained():
    # what torch 2.11 raises for a file on a full disk
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert "free some space" in (explain_system_error(error) or "")
