"""Values, names and files that no user means to give: each is refused in one clear line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import edit_json, run_conversion
from safetensors.torch import load_file, save_file

from kvfold.convert.console import check_output_files
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError
from kvfold.convert.measure.sweep_targets import parse_targets
from kvfold.convert.request import EvalRequest

POOLED = ("--to", "mqa", "--method", "mean", "--quiet")


@pytest.fixture
def model(tmp_path):
    """A copy of the model that ships."""
    return Path(shutil.copytree(demo_folder(), tmp_path / "model"))


def test_a_long_value_is_shortened(kvfold, model):
    for value in ("x" * 29_000, "x y " * 7_000, ["a b"] * 5_000):
        edit_json(model / "config.json", model_type=value)
        done = kvfold("inspect", model, status=2)
        assert max(map(len, done.stderr.splitlines())) < 2000


def test_control_codes_and_bytes_in_names_are_escaped(kvfold, model):
    name = os.fsdecode(b"red\x1b[31m\xff")
    os.rename(model, model.with_name(name))
    done = kvfold("inspect", model.with_name(name))
    assert r"red\x1b[31m" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_name_that_leaves_no_room_for_the_temporary_folder(kvfold, tmp_path):
    done = kvfold("convert", demo_folder(), tmp_path / ("o" * 240), *POOLED, status=2)
    assert "its name is too long" in done.stderr


def test_nan_is_told_when_it_is_copied_and_when_it_is_measured(kvfold, model):
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    done = kvfold("convert", model, model.with_name("out"), *POOLED)
    assert "NaN or infinite elements were copied" in done.stderr
    assert "in 1 tensors such as model.norm.weight" in done.stderr
    sizes = ("--samples", 1, "--seq-len", 16, "--quiet")
    done = kvfold("drift", demo_folder(), model.with_name("out"), *sizes, status=2)
    assert "out: its predictions are NaN" in done.stderr
    sizes = ("--samples", 2, "--lengths", 64, "--no-retrieval", "--quiet")
    done = kvfold("eval", demo_folder(), model.with_name("out"), *sizes, status=2)
    assert "out: its predictions are NaN" in done.stderr


def test_closed_streams_are_no_error():
    command = f"{sys.executable} -m kvfold inspect {demo_folder()} >&- 2>&-"
    assert subprocess.run(command, shell=True, check=False).returncode == 0


def test_digits_of_other_scripts_are_no_numbers():
    for digit in ("\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT THREE}"):
        with pytest.raises(InputError):
            parse_targets(f"gqa:{digit}")
        with pytest.raises(InputError, match="lengths"):
            EvalRequest(model="m", out="o", lengths=f"128,{digit}")
    with pytest.raises(InputError, match="lengths"):
        EvalRequest(model="m", out="o", lengths="9" * 5000)


def test_results_are_not_written_through_links_or_into_pipes(tmp_path, refused):
    (tmp_path / "other").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.html").symlink_to(tmp_path / "other")
    for file in ("link", "pipe", "x" * 300):
        with refused():
            check_output_files(str(tmp_path / file))
    for folder in ("report", "pipe", "x" * 300):
        with refused():
            check_output_files(None, report=str(tmp_path / folder))


def test_a_begin_token_beyond_the_vocabulary_is_refused(model, refused):
    edit_json(model / "tokenizer_config.json", bos_token="<nope>")
    options = {"calibration": "self", "samples": 2, "seq_len": 16}
    with refused():
        run_conversion(model, model.parent / "out", to="mqa", **options)
    assert not (model.parent / "out").exists()


def test_a_config_that_transformers_cannot_run_is_named(tiny_family, tmp_path):
    source = tiny_family("mixtral", vocab_size=2048, num_experts_per_tok=9)
    with pytest.raises(InputError, match=r"config\.json: transformers cannot build or run"):
        run_conversion(source, tmp_path / "out", to="mqa", samples=2, seq_len=16)
    assert not list(tmp_path.iterdir())


def test_a_conversion_that_overflows_is_not_written(model, refused):
    tensors = load_file(model / "model.safetensors")
    for layer in range(4):
        for name in ("k_proj", "v_proj", "q_proj", "o_proj"):
            weight = tensors[f"model.layers.{layer}.self_attn.{name}.weight"]
            weight.fill_(torch.finfo(weight.dtype).max)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    target = {"to": "mla", "method": "svd", "kv_rank": 24, "rope_dim": 8}
    with refused():
        run_conversion(model, model.parent / "out", **target)
    assert not (model.parent / "out").exists()
