"""Calibrated folds: the frequencies that they are fitted to."""

import json
import shutil

import torch
from safetensors.torch import load_file

from kvfold.convert import ConvertRequest, convert_checkpoint

ROPE = {"rope_theta": 700.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def test_dynamic_rope_is_folded_as_the_rope_of_short_texts_that_it_is(tiny_reader, tmp_path):
    """Up to ``max_position_embeddings`` tokens the two are one model, so that every weight comes out the same."""
    written = []
    for name, rope in (("dynamic", DYNAMIC | ROPE), ("plain", {"rope_type": "default"} | ROPE)):
        model, out = shutil.copytree(tiny_reader, tmp_path / name), tmp_path / f"{name}-folded"
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
        convert_checkpoint(ConvertRequest(model, out, to="mqa", samples=4, seq_len=32, quiet=True))
        assert json.loads((out / "config.json").read_text())["rope_parameters"] == rope
        written.append(load_file(out / "model.safetensors"))
    dynamic, plain = written
    assert all(torch.equal(dynamic[name], plain[name]) for name in plain)
