"""Stored attention tensors <-> canonical weights, for the layouts that a family file can name."""

from dataclasses import replace

import torch
from tiny_models import SIZES

from kvfold.convert.families.family import load_family
from kvfold.convert.families.layer_io import read_layer, write_layer
from kvfold.convert.families.model import Model


def bound(name: str, **changes) -> Model:
    return Model(load_family(name), {**SIZES, "head_dim": 8, "attention_bias": True, **changes})


def stored(model: Model) -> dict[str, torch.Tensor]:
    shapes = {name: tensor.shape for name, tensor in model.tensors.items() if "self_attn" in name}
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_roles_select_what_is_written_in_the_stored_dtype():
    model = bound("llama")
    tensors = {name: tensor.bfloat16() for name, tensor in stored(model).items()}
    written = write_layer(model, 0, read_layer(model, 0, tensors.__getitem__), roles={"k", "o"})
    name = "model.layers.0.self_attn."
    assert set(written) == {
        f"{name}{part}_proj.{kind}" for part in "ko" for kind in ("weight", "bias")
    }
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


def test_a_norm_for_each_head_is_refused_where_one_is_stored(refused):
    model = bound("qwen3")
    weights = read_layer(model, 0, stored(model).__getitem__)
    differing = replace(weights.k_norm, weight=torch.randn(8, 8))
    with refused(ValueError):
        write_layer(model, 0, replace(weights, k_norm=differing))
