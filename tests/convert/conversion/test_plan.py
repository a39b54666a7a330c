"""Plans that are refused from headers alone."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from tiny_models import SIZES

from kvfold.convert import processes
from kvfold.convert.checkpoint.headers import TensorInfo
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.conversion.plan import make_plan
from kvfold.convert.families.model import make_model
from kvfold.convert.request import ConvertRequest

CONFIG = SIZES | {"model_type": "llama", "num_key_value_heads": 4}


def headers(layers):
    """A checkpoint whose weights nobody may read."""
    config = {**CONFIG, "num_hidden_layers": layers}
    position = 0
    infos = {}
    for tensor in make_model(config).tensors.values():
        end = position + 2 * math.prod(tensor.shape)
        infos[tensor.name] = TensorInfo(
            tensor.name, "BF16", tensor.shape, "model.safetensors", position, end
        )
        position = end
    return Checkpoint(Path(), config, infos, "hollow", {}, SimpleNamespace(keepable={}), {})


def test_weights_of_whole_numbers_are_refused(refused):
    checkpoint = headers(2)
    name = "model.layers.1.self_attn.k_proj.weight"
    checkpoint.tensors[name] = replace(checkpoint.tensors[name], dtype="I16")
    with refused():
        make_plan(ConvertRequest("m", "o", "gqa", kv_heads=2), checkpoint)


def test_fewer_sequences_than_processes_are_refused(monkeypatch, refused):
    request = ConvertRequest(model="m", out="o", to="mqa", samples=3, seq_len=64)
    make_plan(request, headers(2))
    monkeypatch.setattr(processes, "world_size", lambda: 4)
    with refused():
        make_plan(request, headers(2))
