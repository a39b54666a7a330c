"""A training step in bfloat16: its attention, when it pays, and that it reaches what float32 reaches."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.attention import interface
from kvfold.attention.interface import BLOCKWISE
from kvfold.convert import device
from kvfold.convert.device import bfloat16_pays
from kvfold.convert.training.refine import refine_layer
from tests.convert.training.test_refine import first_step, plan_of, task_of


@pytest.mark.parametrize(("heads", "groups", "dim", "value_dim"), [(4, 4, 12, 8), (6, 2, 8, 8), (3, 1, 8, 8)])
@pytest.mark.parametrize("length", [1, 5, 128, 200])
def test_under_autocast_attention_is_causal_and_rounds_to_bfloat16(heads, groups, dim, value_dim, length):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, heads, length, dim), (2, groups, length, dim), (2, groups, length, value_dim)
    inputs = [torch.randn(shape, generator=generator).bfloat16().float().requires_grad_() for shape in shapes]
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = ALL_ATTENTION_FUNCTIONS[BLOCKWISE](torch.nn.Module(), *inputs, None, scaling=0.3)
    expected = scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
    assert found.dtype == torch.bfloat16
    weights = torch.randn(expected.shape, generator=generator)
    results = [(result, *torch.autograd.grad((result * weights).sum(), inputs)) for result in (found, expected)]
    for one, other in zip(*results, strict=True):
        assert float((one - other).detach().norm()) <= 0.01 * float(other.detach().norm()) + 1e-6


def test_bfloat16_pays_for_weights_that_are_stored_in_it_on_a_cpu_with_units_for_it(monkeypatch):
    cpu = torch.device("cpu")
    for units in (True, False):
        monkeypatch.setattr(device, "has_bfloat16_units", lambda units=units: units)
        assert bfloat16_pays(cpu, [torch.bfloat16, torch.bfloat16]) == units
        assert not bfloat16_pays(cpu, [torch.bfloat16, torch.float32])
        assert not bfloat16_pays(cpu, [torch.float16])
        assert not bfloat16_pays(torch.device("cuda"), [torch.bfloat16])


def in_bfloat16(folder, copy):
    folder = shutil.copytree(folder, copy)
    path = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("target", [{"to": "mqa"}, {"to": "mla", "kv_rank": 12, "rope_dim": 4, "method": "svd"}])
def test_steps_in_bfloat16_reach_what_those_in_float32_do(tiny_family, tmp_path, monkeypatch, target):
    plan = plan_of(in_bfloat16(tiny_family("llama"), tmp_path / "llama"))
    errors, dtypes = {}, []
    attend = interface.blocked_attention
    monkeypatch.setattr(interface, "blocked_attention", lambda *args: dtypes.append(args[0].dtype) or attend(*args))
    for fast in (False, True):
        monkeypatch.setattr(device, "has_bfloat16_units", lambda fast=fast: fast)
        _steps, step, tensors = first_step(plan)
        refined = refine_layer(step, tensors, task_of(plan))
        errors[fast] = refined.after
        assert bool(dtypes) == fast
    assert errors[True] == pytest.approx(errors[False], rel=0.05)
