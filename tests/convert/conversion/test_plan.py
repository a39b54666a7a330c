"""Plans that are refused from headers alone."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import SIZES

from kvfold.convert import processes
from kvfold.convert.checkpoint.headers import TensorInfo
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.conversion.plan import check_processes, make_plan
from kvfold.convert.errors import InputError
from kvfold.convert.families.model import model_of
from kvfold.convert.request import ConvertRequest

CONFIG = SIZES | {"model_type": "llama", "num_key_value_heads": 4}


def headers(layers: int) -> Checkpoint:
    """A checkpoint whose weights nobody may read."""
    config, position, infos = {**CONFIG, "num_hidden_layers": layers}, 0, {}
    for tensor in model_of(config).tensors.values():
        end = position + 2 * math.prod(tensor.shape)
        infos[tensor.name] = TensorInfo(tensor.name, "BF16", tensor.shape, "model.safetensors", position, end)
        position = end
    return Checkpoint(Path(), config, infos, "hollow", {}, None, {})


def test_weights_of_whole_numbers_are_refused():
    checkpoint = headers(2)
    name = "model.layers.1.self_attn.k_proj.weight"
    checkpoint.tensors[name] = replace(checkpoint.tensors[name], dtype="I16")
    with pytest.raises(InputError) as raised:
        make_plan(ConvertRequest("m", "o", "gqa", kv_heads=2), checkpoint)
    assert raised.value.details == (f"wrong dtype: {name} is I16; it must be one of BF16, F16, F32, F64",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polish": 10}, "--polish trains the whole model in one process, but 4 are running; run without torchrun"),
        ({"samples": 3}, "--samples 3 must be at least 4, one sequence per process"),
    ],
)
def test_what_several_processes_cannot_share_is_refused(options, message, monkeypatch):
    plan = make_plan(ConvertRequest(model="m", out="o", to="mqa", **options), headers(2))
    check_processes(plan)
    monkeypatch.setattr(processes, "count", lambda: 4)
    with pytest.raises(InputError, match=message):
        check_processes(plan)
