"""A training step in bfloat16: its attention, when it pays, and that it reaches what float32
reaches.
"""

import shutil
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.attention import interface
from kvfold.attention.interface import BLOCKWISE
from kvfold.convert import device
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.calibration import open_source_stream
from kvfold.convert.device import training_autocast
from kvfold.convert.training.refine import refine_layer
from tests.convert.training.test_refine import first_step, plan_of, task_of


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "value_dim"), [(4, 4, 12, 8), (6, 2, 8, 8), (3, 1, 8, 8)]
)
@pytest.mark.parametrize("length", [1, 5, 128, 200])
def test_under_autocast_attention_is_causal_and_rounds_to_bfloat16(
    heads, groups, dim, value_dim, length
):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, heads, length, dim), (2, groups, length, dim), (2, groups, length, value_dim)
    inputs = [
        torch.randn(shape, generator=generator).bfloat16().float().requires_grad_()
        for shape in shapes
    ]
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = ALL_ATTENTION_FUNCTIONS[BLOCKWISE](torch.nn.Module(), *inputs, None, scaling=0.3)
    expected = scaled_dot_product_attention(
        *inputs, is_causal=True, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    assert found.dtype == torch.bfloat16
    weights = torch.randn(expected.shape, generator=generator)
    results = [
        (result, *torch.autograd.grad((result * weights).sum(), inputs))
        for result in (found, expected)
    ]
    for one, other in zip(*results, strict=True):
        assert float((one - other).detach().norm()) <= 0.01 * float(other.detach().norm()) + 1e-6


def test_the_faster_arithmetic_is_measured_and_taken_only_for_weights_stored_in_it(
    tiny_family, tmp_path, monkeypatch
):
    stored = in_bfloat16(tiny_family("llama"), tmp_path / "llama")
    cpu = torch.device("cpu")
    assert 0.001 < device.measure_bfloat16_speedup(cpu, 96, 64) < 1000
    timed = []
    with (
        closing(open_checkpoint(stored)) as half,
        closing(open_checkpoint(tiny_family("llama"))) as single,
    ):
        for speed, expected in ((4.0, torch.bfloat16), (1.1, None)):
            monkeypatch.setattr(
                device,
                "measure_bfloat16_speedup",
                lambda *shape, speed=speed: timed.append(shape) or speed,
            )
            assert training_autocast(half, cpu) == expected
            assert training_autocast(single, cpu) is None
        assert training_autocast(half, cpu, "bfloat16") == torch.bfloat16
        assert training_autocast(half, cpu, "float32") is None
        assert timed == [(cpu, 64, 64)] * 2  # the shape of most weights


def test_a_resumed_run_uses_the_arithmetic_that_was_measured_first(
    tiny_family, tmp_path, monkeypatch
):
    plan = plan_of(in_bfloat16(tiny_family("llama"), tmp_path / "llama"), quiet=False)
    for speed in (4.0, 0.5):
        monkeypatch.setattr(device, "measure_bfloat16_speedup", lambda *shape, speed=speed: speed)
        assert open_source_stream(plan, tmp_path).autocast == torch.bfloat16
    assert (
        open_source_stream(
            replace(plan, request=replace(plan.request, precision="float32")), tmp_path / "llama"
        ).autocast
        is None
    )


def in_bfloat16(folder, copy):
    folder = shutil.copytree(folder, copy)
    path = folder / "model.safetensors"
    save_file(
        {name: tensor.bfloat16() for name, tensor in load_file(path).items()},
        path,
        metadata={"format": "pt"},
    )
    return folder


@pytest.mark.parametrize(
    "target", [{"to": "mqa"}, {"to": "mla", "kv_rank": 12, "rope_dim": 4, "method": "svd"}]
)
def test_steps_in_bfloat16_reach_what_those_in_float32_do(
    tiny_family, tmp_path, monkeypatch, target
):
    plan = plan_of(in_bfloat16(tiny_family("llama"), tmp_path / "llama"))
    errors = {}
    dtypes = []
    attend = interface.blocked_attention
    monkeypatch.setattr(
        interface, "blocked_attention", lambda *args: dtypes.append(args[0].dtype) or attend(*args)
    )
    for fast in (False, True):
        monkeypatch.setattr(
            device, "measure_bfloat16_speedup", lambda *shape, fast=fast: 4.0 if fast else 1.0
        )
        _steps, step, tensors = first_step(plan)
        refined = refine_layer(step, tensors, task_of(plan))
        errors[fast] = min(refined.errors)
        assert (torch.bfloat16 in dtypes) == fast
    assert errors[True] == pytest.approx(errors[False], rel=0.05)
