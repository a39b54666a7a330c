"""Non-finite weights that no transform reads: detected by the activations of calibration text."""

import math
import shutil

import pytest
from helpers.checkpoints import run_conversion
from safetensors.torch import load_file, save_file

from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError

TARGETS = {
    "mqa": {"to": "mqa", "group": "contiguous"},
    "refined mean": {"to": "mqa", "method": "mean", "refine": 1},
    "mla": {"to": "mla", "kv_rank": 16, "rope_dim": 16},
}
WHERE = {
    "model.layers.1.mlp.up_proj.weight": "in layer 1",
    "model.layers.2.input_layernorm.weight": "in layer 2",
    "model.norm.weight": "before the first layer or after the last",
}


@pytest.fixture
def damaged(tmp_path):
    def make(name, value):
        folder = shutil.copytree(demo_folder(), tmp_path / "model")
        tensors = load_file(folder / "model.safetensors")
        tensors[name][..., 5] = value
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [("mqa", name, math.nan) for name in WHERE]
    + [
        ("refined mean", "model.layers.1.mlp.up_proj.weight", math.nan),
        ("mla", "model.layers.1.mlp.up_proj.weight", math.inf),
    ],
)
def test_a_damaged_tensor_is_named_with_its_layer(tmp_path, out, damaged, target, name, value):
    text = tmp_path / "few.txt"
    text.write_text("def function(argument): return a value of the list. " * 60)
    options = {"calibration": text, "samples": 1, "seq_len": 8, **TARGETS[target]}
    with pytest.raises(InputError) as caught:
        run_conversion(damaged(name, value), out, **options)
    assert str(caught.value).startswith(f"tensor '{name}' has ")
    assert WHERE[name] in str(caught.value)
    assert not out.exists()
