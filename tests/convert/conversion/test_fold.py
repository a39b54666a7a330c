"""Calibrated folds: the frequencies that they are fitted to."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.plan import make_plan
from kvfold.convert.conversion.source import fold_rotary
from kvfold.convert.data import demo_folder

ROPE = {"rope_theta": 700.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def model_with(folder, rope):
    """The demo model, read with other rotary frequencies than those it was trained with."""
    shutil.copytree(demo_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    return folder


def test_dynamic_rope_is_folded_as_the_rope_of_short_texts_that_it_is(tmp_path):
    """Up to ``max_position_embeddings`` tokens the two are one model, so that every weight comes out the same."""
    written = []
    for name, rope in (("dynamic", DYNAMIC | ROPE), ("plain", {"rope_type": "default"} | ROPE)):
        model = model_with(tmp_path / name, rope)
        out = tmp_path / f"{name}-folded"
        request = ConvertRequest(
            model=str(model), out=str(out), to="mqa", group="contiguous", samples=8, seq_len=64, quiet=True
        )
        convert_checkpoint(request)
        assert json.loads((out / "config.json").read_text())["rope_parameters"] == rope
        written.append(load_file(out / "model.safetensors"))
    dynamic, plain = written
    assert all(torch.equal(dynamic[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("family", "rope"),
    [("llama", DYNAMIC | ROPE), ("stablelm", DYNAMIC | ROPE | {"partial_rotary_factor": 0.5})],
)
def test_the_frequencies_of_dynamic_rope(tmp_path, tiny_family, family, rope):
    source = tiny_family(family)
    folder = shutil.copytree(source, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config.pop("partial_rotary_factor", None)
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    checkpoint = open_checkpoint(folder)
    plan = make_plan(ConvertRequest(model=str(folder), out="out", to="mqa"), checkpoint)
    dims = int(plan.geometry.head_dim * rope.get("partial_rotary_factor", 1))
    expected = 700.0 ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    torch.testing.assert_close(fold_rotary(plan, 0).theta, expected, rtol=1e-12, atol=0)
