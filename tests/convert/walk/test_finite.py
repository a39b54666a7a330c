"""Non-finite weights that no transform reads: detected by the activations of calibration text."""

import math
import shutil

import pytest
import torch
from helpers.checkpoints import run_conversion
from safetensors.torch import load_file, save_file

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.walk.walk import check_finite

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


def test_overflow_without_a_damaged_tensor_says_so():
    checkpoint = open_checkpoint(demo_folder())
    stream = CheckpointStream(checkpoint.config, checkpoint.read_tensor, list(checkpoint.tensors))
    check_finite([torch.zeros(3)], stream, 1)
    with pytest.raises(
        InputError,
        match=(
            r"in layer 1, although the weights are finite: .* float32; the model is probably"
            r" damaged"
        ),
    ):
        check_finite([torch.zeros(3), torch.tensor([1.0, math.inf])], stream, 1)
