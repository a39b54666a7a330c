"""Training a layer's attention against its source: loss, trained tensors, best weights."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest
import torch
from helpers.attention import random_tokens
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from kvfold.attention import interface
from kvfold.convert import ConvertRequest, device
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.calibration import open_source_stream
from kvfold.convert.conversion.layers import fit_layer, make_refine_settings
from kvfold.convert.conversion.plan import make_plan
from kvfold.convert.device import choose_autocast_dtype, choose_compute_dtype
from kvfold.convert.training import refine as refining
from kvfold.convert.training.refine import (
    MOST_STEPS,
    REFINE_ROUND,
    RefineSettings,
    compute_learning_rate_factor,
    make_examples,
    refine_layer,
)
from kvfold.convert.walk.walk import Student, Teacher, Walk

# family -> the module that is given the residual stream after the attention
AFTER_ATTENTION = {
    "llama": "post_attention_layernorm",
    "qwen3": "post_attention_layernorm",
    "granite": "post_attention_layernorm",
    "gemma2": "pre_feedforward_layernorm",
    "olmo2": "mlp",
}


def plan_of(folder, **options):
    options = {"to": "mqa", "method": "mean", "refine": 30, "quiet": True, **options}
    request = ConvertRequest(folder, "unused", **options)
    return make_plan(request, open_checkpoint(request.model))


def first_step(plan, tokens=None):
    """The first step of a walk over ``tokens``, random ones by default, and its pooled tensors."""
    if tokens is None:
        tokens = random_tokens(16, 24)
    with TemporaryDirectory() as scratch:
        source = open_source_stream(plan, Path(scratch))
    student = Student(source, plan.output)
    walk = Walk(Teacher(source, tokens[:4], tokens[4:]), student)
    steps = iter(walk)
    step = next(steps)
    return steps, step, plan.output.encode_layer(0, fit_layer(plan, 0).weights)


def task_of(plan, **changes):
    return RefineSettings(**{**vars(make_refine_settings(plan, plan.request.refine)), **changes})


@pytest.fixture
def llama(tiny_family):
    """A plan, the first step of its walk, and the pooled tensors of that."""
    plan = plan_of(tiny_family("llama"))
    steps, step, tensors = first_step(plan)
    yield plan, step, tensors
    steps.close()


def refined(llama, **changes):
    """The result on the first layer."""
    plan, step, tensors = llama
    return refine_layer(step, tensors, task_of(plan, **changes))


@pytest.mark.parametrize("family", AFTER_ATTENTION)
def test_the_update_is_what_the_layer_adds_to_its_residual(tiny_family, family):
    plan = plan_of(tiny_family(family))
    _steps, step, _ = first_step(plan)
    seen = []
    module = step.teacher.layer.module.get_submodule(AFTER_ATTENTION[family])
    handle = module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    hidden = step.teacher.held_out[0]
    layer = step.teacher.layer
    with torch.no_grad():
        layer(hidden)
        handle.remove()
        added = task_of(plan).update.compute_update(layer, layer.attend(hidden).attention)
    assert_close(hidden + added, seen[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", [*AFTER_ATTENTION, "cohere", "phi", "mixtral"])
def test_the_error_falls_in_every_family(tiny_family, family):
    plan = plan_of(tiny_family(family))
    _steps, step, tensors = first_step(plan)
    found = refine_layer(step, tensors, task_of(plan))
    assert min(found.errors) < 0.95 * found.errors[0]
    assert {name: t.shape for name, t in found.tensors.items()} == {
        name: t.shape for name, t in tensors.items()
    }
    for name in tensors:
        assert not name.endswith(".weight") or not torch.equal(
            found.tensors[name].float(), tensors[name].float()
        )


@pytest.mark.parametrize(("massive", "share"), [("both", 1e-4), ("student", 1.0)])
def test_targets_correct_earlier_errors_and_every_token_counts_relative_to_its_residual(
    llama, massive, share
):
    plan, step, _ = llama
    update = task_of(plan).update
    layer = step.teacher.layer
    hidden = step.held_out[0].clone()
    student = hidden * 1.01
    for states in (hidden, student) if massive == "both" else (student,):
        states[0, 0] *= 1000.0
    with torch.no_grad():
        attention = layer.attend(hidden).attention
        after = hidden + update.compute_update(layer, attention)
    (chunk,) = make_examples(update, layer, [(hidden, attention, student)]).chunks
    assert_close(chunk.targets + student, after, rtol=0, atol=1e-4)
    sizes = [(chunk.weights * states).square().mean(-1) for states in (after, student)]
    assert_close(torch.maximum(*sizes), torch.ones_like(sizes[0]))
    # Of massive activations in both, 1 % of the token counts, as of any other token.
    missing = (chunk.weights * (hidden - student)).square().mean(-1)[0, 0]
    assert missing == pytest.approx(share, rel=0.5)


@pytest.mark.parametrize(("rate", "tries"), [(0.05, 1), (8.0, 3), (1e38, None)])
def test_a_layer_that_got_no_better_is_tried_again_more_slowly_or_keeps_its_weights(
    llama, monkeypatch, rate, tries
):
    monkeypatch.setattr(refining, "_ERROR_POWER", 0)
    monkeypatch.setattr(refining, "_WIDTH_LR", 1e39)
    monkeypatch.setattr(refining, "_RELATIVE_LR", rate)
    made = Mock(side_effect=refining.RefineTask)
    monkeypatch.setattr(refining, "RefineTask", made)
    found = refined(llama)
    assert made.call_count == (tries or 3)
    if tries:
        assert found.best_step == 30
        assert min(found.errors) < 0.95 * found.errors[0]
    else:
        assert (found.best_step, found.steps, min(found.errors)) == (0, 30, found.errors[0])
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in llama[2].items())


@pytest.mark.parametrize(("share", "steps"), [(0.98, MOST_STEPS), (0.992, 2 * REFINE_ROUND)])
def test_schedules_fall_to_zero(share, steps):
    """``auto`` lowers the rate once a round gains less than one percent, and ends in any case."""
    assert [compute_learning_rate_factor(2, done, [1.0]) for done in range(3)] == [1.0, 0.5, 0.0]
    rates = []
    while (
        rate := compute_learning_rate_factor(
            "auto", len(rates), [share**n for n in range(len(rates) // REFINE_ROUND + 1)]
        )
    ) > 0:
        rates.append(rate)
    assert len(rates) == steps
    assert rates[-REFINE_ROUND:] == pytest.approx(
        [1 - done / REFINE_ROUND for done in range(REFINE_ROUND)]
    )


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
    return lambda speed: monkeypatch.setattr(device, "measure_speedup", lambda *_: speed)


def test_the_faster_arithmetic_is_taken_only_for_weights_stored_in_it(
    tiny_family, stored, set_speed
):
    cpu = torch.device("cpu")
    assert device.measure_speedup(cpu, torch.bfloat16, 96, 64) > 0
    checkpoint = open_checkpoint(stored)
    assert choose_compute_dtype(checkpoint, cpu, "auto") == torch.float32
    assert choose_compute_dtype(checkpoint, torch.device("cuda"), "auto") == torch.bfloat16
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
