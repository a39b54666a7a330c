"""A training step in bfloat16: when it pays, and that it reaches what float32 reaches."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold.attention import interface
from kvfold.convert import device
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.calibration import open_source_stream
from kvfold.convert.device import choose_autocast_dtype
from kvfold.convert.training.refine import refine_layer
from tests.convert.training.test_refine import first_step, plan_of, task_of


@pytest.fixture
def stored(tiny_family, tmp_path):
    """A tiny llama whose weights are in bfloat16."""
    folder = shutil.copytree(tiny_family("llama"), tmp_path / "llama")
    path = folder / "model.safetensors"
    weights = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture
def set_speed(monkeypatch):
    """``set_speed(4.0)``: products in bfloat16 are measured to be so many times as fast."""
    return lambda speed: monkeypatch.setattr(device, "measure_bfloat16_speedup", lambda *_: speed)


def test_the_faster_arithmetic_is_taken_only_for_weights_stored_in_it(
    tiny_family, stored, set_speed
):
    cpu = torch.device("cpu")
    assert device.measure_bfloat16_speedup(cpu, 96, 64) > 0
    checkpoint = open_checkpoint(stored)
    for speed, expected in ((4.0, torch.bfloat16), (1.1, None)):
        set_speed(speed)
        assert choose_autocast_dtype(checkpoint, cpu) == expected
        assert choose_autocast_dtype(open_checkpoint(tiny_family("llama")), cpu) is None
        assert choose_autocast_dtype(checkpoint, cpu, "bfloat16") == torch.bfloat16
        assert choose_autocast_dtype(checkpoint, cpu, "float32") is None


def test_a_resumed_run_uses_the_arithmetic_that_was_measured_first(stored, tmp_path, set_speed):
    plan = plan_of(stored, quiet=False)
    for speed in (4.0, 0.5):
        set_speed(speed)
        assert open_source_stream(plan, tmp_path).autocast == torch.bfloat16


def test_steps_in_bfloat16_reach_what_those_in_float32_do(stored, set_speed, monkeypatch):
    plan = plan_of(stored)
    errors = {}
    dtypes = []
    attend = interface.blocked_attention
    monkeypatch.setattr(
        interface, "blocked_attention", lambda *args: dtypes.append(args[1].dtype) or attend(*args)
    )
    for fast in (False, True):
        set_speed(4.0 if fast else 1.0)
        _steps, step, tensors = first_step(plan)
        refined = refine_layer(step, tensors, task_of(plan))
        errors[fast] = min(refined.errors)
        assert (torch.bfloat16 in dtypes) == fast
    assert errors[True] == pytest.approx(errors[False], rel=0.05)
