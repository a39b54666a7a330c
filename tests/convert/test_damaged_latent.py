"""Damaged latent (MLA) checkpoints: inspect believes no config against its tensors, drift none
against its class.
"""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.cases import read_cases
from helpers.checkpoints import edit_json, tensors
from safetensors.torch import save_file

from kvfold.convert import DriftRequest, InputError, drift_checkpoints, inspect_checkpoint
from kvfold.convert.data import demo_folder


@pytest.fixture
def out(demo_latent, tmp_path):
    return Path(shutil.copytree(demo_latent, tmp_path / "out"))


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
