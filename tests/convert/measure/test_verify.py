"""``kvfold verify``: what was written is sound; everything that differs later is named."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.cases import read_cases
from helpers.checkpoints import edit_json, read_json, run_conversion, tensors
from helpers.processes import run_kvfold
from safetensors.torch import save_file

from kvfold.convert import (
    DriftRequest,
    InputError,
    drift_checkpoints,
    inspect_checkpoint,
    verify_checkpoint,
)
from kvfold.convert.data import demo_folder


@pytest.fixture
def out(demo_latent, tmp_path):
    return Path(shutil.copytree(demo_latent, tmp_path / "out"))


@pytest.mark.parametrize("name", ["fold", "latent"])
def test_what_was_written_is_sound(demo_latent, tmp_path, name):
    out = demo_latent if name == "latent" else tmp_path / "fold"
    if name == "fold":
        run_conversion(demo_folder(), out, to="gqa", kv_heads=4, method="mean")
    done = verify_checkpoint(str(out))
    record = read_json(out / "kvfold.json")
    assert set(record["files"]) == {path.name for path in out.iterdir()} - {"kvfold.json"}
    assert (done.problems, done.files) == ([], len(record["files"]))
    source = verify_checkpoint(str(demo_folder()))
    assert (source.problems, source.files) == ([], 0)


def test_a_file_that_cannot_be_opened_any_more(out, refused):
    with (out / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with refused():
        verify_checkpoint(out)
    (out / "tokenizer.json").write_text("{}")
    first, second = verify_checkpoint(out).problems
    assert first.startswith("tokenizer.json: changed since it was written: ")
    assert second.startswith("model.safetensors: not a valid safetensors file: ")


def test_a_change_of_any_byte_is_found(out):
    """In the length of the header, the header, its padding, and the first and the last tensor."""
    file = out / "model.safetensors"
    sound = file.read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    for position in (0, 10, header - 1, header, len(sound) - 1):
        changed = bytearray(sound)
        changed[position] ^= 1
        file.write_bytes(changed)
        try:
            problems = verify_checkpoint(out).problems
        except InputError as error:
            problems = [error.message]
        assert problems, position
    file.write_bytes(sound)
    stored = read_json(out / "kvfold.json")["tensors"]
    del stored["model.norm.weight"]["sha256"]
    edit_json(out / "kvfold.json", tensors=stored)
    (problem,) = verify_checkpoint(out).problems
    assert "model.norm.weight" in problem


def test_files_that_changed(out, told):
    (out / "tokenizer.json").write_text("{}")
    (out / "generation_config.json").unlink()
    (out / "thesis.tex").touch()
    problems = verify_checkpoint(str(out)).problems
    for problem in problems:
        told(problem)
    for name in ("tokenizer.json", "generation_config.json", "thesis.tex"):
        assert any(name in problem for problem in problems)


def test_tensors_that_are_not_the_configs_or_not_finite(out, told, refused):
    (out / "kvfold.json").unlink()
    stored = tensors(out)
    del stored["model.norm.weight"]
    stored["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(3, 5)
    stored["model.layers.0.self_attn.kv_a_layernorm.weight"][3] = torch.nan
    save_file(stored, out / "model.safetensors")
    done = verify_checkpoint(str(out))
    for problem in done.problems:
        told(problem)
    with refused():
        run_kvfold("verify", out)


@pytest.mark.parametrize(
    "content",
    [
        "[",
        '{"files": 3}',
        '{"files": {"x": 1}}',
        '{"files": {"../x": "a"}, "tensors": {"x": {"sha256": "a"}}}',
    ],
)
def test_a_record_that_is_none(out, content):
    (out / "kvfold.json").write_text(content)
    with pytest.raises(InputError, match=r"kvfold\.json"):
        run_kvfold("verify", out)


def test_a_record_without_hashes_of_tensors(out, refused):
    names = read_json(out / "kvfold.json")["tensors"]
    edit_json(out / "kvfold.json", tensors={name: {} for name in names})
    with refused():
        verify_checkpoint(out)


@pytest.mark.parametrize(("values", "problem"), read_cases(__file__)["configs"])
def test_inspect_names_what_is_wrong(out, values, problem):
    edit_json(out / "config.json", **values)
    with pytest.raises(InputError) as raised:
        inspect_checkpoint(str(out))
    assert raised.value.message.startswith("out: ")
    assert problem in "\n".join([raised.value.message, *raised.value.details])


def test_drift_checks_shapes_before_it_runs(out):
    stored = tensors(out)
    stored["model.embed_tokens.weight"] = stored["model.embed_tokens.weight"][:-1].clone()
    stored["model.layers.3.mlp.up_proj.weight"] = torch.zeros(3, 5)
    save_file(stored, out / "model.safetensors")
    with pytest.raises(InputError, match=r"^out: the tensors do not match config.json") as raised:
        drift_checkpoints(DriftRequest(str(demo_folder()), str(out)))
    assert "model.embed_tokens.weight" in raised.value.message
    assert "model.layers.3.mlp.up_proj.weight" in raised.value.message
