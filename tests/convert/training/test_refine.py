"""Training a layer's attention against its source: the loss, the trained tensors, the best weights."""

from itertools import islice

import pytest
import torch
from transformers import AutoTokenizer

from kvfold.convert import ConvertRequest
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.calibration import source_stream
from kvfold.convert.conversion.plan import make_plan
from kvfold.convert.conversion.pooled import pooled_layer
from kvfold.convert.conversion.refinement import refinement
from kvfold.convert.data import demo_folder, read_text
from kvfold.convert.targets.mla.constant import CONSTANT, lr_multipliers
from kvfold.convert.training import refine as refining
from kvfold.convert.training.objective import examples
from kvfold.convert.training.refine import (
    AUTO_STEPS,
    ROUND,
    Refinement,
    default_lr,
    first_lr,
    lr_schedule,
    refine_layer,
    sample_batches,
)
from kvfold.convert.walk.output_fit import token_weights
from kvfold.convert.walk.walk import Student, Teacher, Walk

# family -> the module that is given the residual stream after the attention
AFTER_ATTENTION = {
    "llama": "post_attention_layernorm",
    "qwen3": "post_attention_layernorm",
    "granite": "post_attention_layernorm",
    "gemma2": "pre_feedforward_layernorm",
    "olmo2": "mlp",
}
REACHED = (
    0.899902,
    0.400023,
)  # errors of the first layer of the model that ships, pooled to MQA: before and after 20 steps


def plan_of(folder, **options):
    request = ConvertRequest(
        **{"model": str(folder), "out": "unused", "to": "mqa", "method": "mean", "refine": 30, "quiet": True, **options}
    )
    return make_plan(request, open_checkpoint(request.model))


def first_step(plan, tokens=None):
    """The first step of a walk over ``tokens``, random ones by default, and its pooled tensors."""
    if tokens is None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, plan.geometry.vocabulary, (16, 24), generator=generator)
    source = source_stream(plan)
    twin = Student(source, plan.layout.config, plan.layout.tensors)
    walk = Walk(Teacher(source, tokens[:4], tokens[4:], keep_calibration=True), twin)
    steps = iter(walk)
    step = next(steps)
    return steps, step, plan.layout.encode(0, pooled_layer(plan, 0))


def task_of(plan, **changes):
    task = refinement(plan, plan.request.refine, lambda layer, step, error: None)
    return Refinement(**{**vars(task), **changes})


@pytest.mark.parametrize("family", AFTER_ATTENTION)
def test_the_update_is_what_the_layer_adds_to_its_residual(tiny_family, family):
    plan = plan_of(tiny_family(family))
    _steps, step, _ = first_step(plan)
    seen = []
    module = step.teacher.module.get_submodule(AFTER_ATTENTION[family])
    handle = module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    hidden = step.held_out[0]
    with torch.no_grad():
        step.teacher(hidden)
        handle.remove()
        added = task_of(plan).update.of(step.teacher, step.teacher.attend(hidden))
    torch.testing.assert_close(hidden + added, seen[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", [*AFTER_ATTENTION, "cohere", "phi", "mixtral"])
def test_the_error_falls_in_every_family(tiny_family, family):
    plan = plan_of(tiny_family(family))
    _steps, step, tensors = first_step(plan)
    errors = []
    refined = refine_layer(step, tensors, task_of(plan, progress=lambda layer, done, error: errors.append(error)))
    assert refined.before == errors[0]
    assert refined.after == min(errors) < 0.95 * refined.before
    assert refined.tensors.keys() == tensors.keys()
    assert all(refined.tensors[name].shape == tensor.shape for name, tensor in tensors.items())
    unmoved = [name for name in tensors if torch.equal(refined.tensors[name], tensors[name].float())]
    assert not [name for name in unmoved if name.endswith(".weight")]


def test_the_target_mends_what_earlier_layers_got_wrong(tiny_family):
    _steps, step, _ = first_step(plan_of(tiny_family("llama")))
    student = [chunk + 0.5 for chunk in step.held_out]
    task = task_of(plan_of(tiny_family("llama")))
    with torch.no_grad():
        expected = step.held_out[0] + step.teacher.attend(step.held_out[0]).attention
    found = examples(task.update, step.teacher, step.held_out, student)
    torch.testing.assert_close(found.targets[0] + student[0], expected, rtol=0, atol=1e-6)


def test_every_token_counts_relative_to_its_residual(tiny_family):
    plan = plan_of(tiny_family("llama"))
    _steps, step, _ = first_step(plan)
    update = task_of(plan).update
    hidden = [chunk.clone() for chunk in step.held_out]
    hidden[0][0, 0] *= 1000.0  # a massive activation
    student = [chunk * 1.01 for chunk in hidden]
    found = examples(update, step.teacher, hidden, student)
    with torch.no_grad():
        after = hidden[0] + update.of(step.teacher, step.teacher.attend(hidden[0]))
    sizes = torch.maximum(*((found.weights[0] * each).square().mean(-1) for each in (after, student[0])))
    torch.testing.assert_close(sizes, torch.ones_like(sizes))
    share = (found.weights[0][0, 0] * (hidden[0] - student[0])[0, 0]).square().mean()
    assert share < 1.5e-4  # 1 % of it, as of any other token
    assert found.inherited < 1.5e-4


def test_weights_of_empty_residuals_can_be_summed():
    """As the output fit sums their squares, in float64."""
    assert token_weights(torch.zeros(2, 8, 4, dtype=torch.float64)).square().sum().isfinite()


def test_a_massive_token_of_the_student_alone_does_not_rule(tiny_family):
    plan = plan_of(tiny_family("llama"))
    _steps, step, _ = first_step(plan)
    student = [chunk.clone() for chunk in step.held_out]
    student[0][0, 3] *= 1000.0  # the teacher's stays as it is
    found = examples(task_of(plan).update, step.teacher, step.held_out, student)
    missing = (found.weights[0][0, 3] * (step.held_out[0] - student[0])[0, 3]).square().mean()
    assert missing == pytest.approx(1, rel=0.01)
    tokens = step.held_out[0][..., 0].numel() * len(step.held_out)
    assert found.inherited == pytest.approx(1 / tokens, rel=0.01)


def test_the_record_tells_what_was_inherited_from_what_the_layer_adds(tiny_family):
    plan = plan_of(tiny_family("llama"))
    _steps, step, tensors = first_step(plan)
    alone = refine_layer(step, tensors, task_of(plan, steps=5))
    assert alone.inherited == 0
    assert alone.own == pytest.approx(alone.after, rel=1e-5)
    for states in (step.student_held_out, step.student_calibration):
        states[:] = [chunk + 0.5 * torch.randn(chunk.shape, generator=torch.manual_seed(0)) for chunk in states]
    spoiled = refine_layer(step, tensors, task_of(plan, steps=5))
    assert spoiled.inherited > 0.1
    assert spoiled.own < 1.5 * alone.own
    assert spoiled.after > spoiled.own
    assert {"before", "after", "inherited", "own", "steps", "kept"} == spoiled.record().keys()


def test_equal_seeds_give_equal_weights_and_other_seeds_others(tiny_family):
    results = []
    for seed in (3, 3, 4):
        plan = plan_of(tiny_family("llama"), seed=seed)
        _steps, step, tensors = first_step(plan)
        results.append(refine_layer(step, tensors, task_of(plan, steps=5)).tensors)
    first, second, other = results
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_layer_that_does_not_get_better_keeps_its_weights(tiny_family, monkeypatch):
    monkeypatch.setattr(refining, "_RELATIVE_LR", 1e4)
    monkeypatch.setattr(refining, "_WIDTH_LR", 1e9)
    plan = plan_of(tiny_family("llama"))
    _steps, step, tensors = first_step(plan)
    refined = refine_layer(step, tensors, task_of(plan))
    assert refined.kept == 0
    assert refined.steps == 30
    assert refined.after == refined.before
    assert all(torch.equal(refined.tensors[name], tensors[name]) for name in tensors)


def test_a_layer_that_got_no_better_is_tried_again_more_slowly(tiny_family, monkeypatch):
    monkeypatch.setattr(refining, "_RETRY_LR", (1e5, 1.0))
    plan = plan_of(tiny_family("llama"))
    _steps, step, tensors = first_step(plan)
    told = []
    refined = refine_layer(step, tensors, task_of(plan, progress=lambda layer, done, error: told.append(done)))
    assert told == [0, 30, 0, 30]
    assert refined.kept == 30
    assert refined.after < 0.95 * refined.before


def test_the_third_try_helps_where_four_times_slower_does_not(tiny_family, monkeypatch):
    monkeypatch.setattr(refining, "_RELATIVE_LR", 8.0)  # 1.0 still helps, 2.0 does not
    monkeypatch.setattr(refining, "_ERROR_POWER", 0)
    monkeypatch.setattr(refining, "_WIDTH_LR", 1e9)
    plan = plan_of(tiny_family("llama"))
    _steps, step, tensors = first_step(plan)
    told = []
    refined = refine_layer(step, tensors, task_of(plan, progress=lambda layer, done, error: told.append(done)))
    assert told == [0, 30, 0, 30, 0, 30]
    assert refined.kept == 30
    assert refined.after < 0.9 * refined.before


def test_each_retry_has_a_quarter_of_the_learning_rate(tiny_family, monkeypatch):
    rates, make = [], refining._optimizer
    monkeypatch.setattr(refining, "first_lr", lambda width, error: 1e4)
    monkeypatch.setattr(refining, "_optimizer", lambda *args: rates.append(args[-1]) or make(*args))
    plan = plan_of(tiny_family("llama"))
    _steps, step, tensors = first_step(plan)
    assert refine_layer(step, tensors, task_of(plan, steps=2)).kept == 0
    assert rates == [10000, 2500, 625]


def test_the_error_that_refinement_reaches_on_the_model_that_ships():
    plan = plan_of(demo_folder())
    text = AutoTokenizer.from_pretrained(demo_folder())(read_text("calibration")[:8000])["input_ids"]
    _steps, step, tensors = first_step(plan, tokens=torch.tensor(text[: 36 * 48]).view(36, 48))
    refined = refine_layer(step, tensors, task_of(plan, steps=20))
    assert (refined.before, refined.after) == pytest.approx(REACHED, rel=1e-3)


def test_weights_that_stop_being_finite_are_not_kept(tiny_family, monkeypatch):
    monkeypatch.setattr(refining, "_RELATIVE_LR", 1e38)
    monkeypatch.setattr(refining, "_WIDTH_LR", 1e38)
    plan = plan_of(tiny_family("llama"))
    _steps, step, tensors = first_step(plan)
    refined = refine_layer(step, tensors, task_of(plan, steps=2))
    assert refined.kept == 0
    assert refined.after == refined.before


def test_a_walk_without_calibration_sequences_is_refused(tiny_family):
    plan = plan_of(tiny_family("llama"))
    _steps, step, tensors = first_step(plan)
    step.calibration = []
    with pytest.raises(refining.KvfoldError, match="keeps the calibration sequences"):
        refine_layer(step, tensors, task_of(plan))


def test_a_number_of_steps_falls_linearly_to_zero():
    assert list(lr_schedule(4, [1.0])) == [1.0, 0.75, 0.5, 0.25]


def run_auto(errors_by_round):
    """The learning rates of ``auto`` when each round ends with the next of these errors."""
    errors, found = [1.0], []
    coming = iter(errors_by_round)
    for lr in lr_schedule("auto", errors):
        found.append(lr)
        if len(found) % ROUND == 0:
            errors.append(next(coming))
    return found


def test_weights_that_are_nearly_right_learn_slowly():
    assert [first_lr(256, error) for error in (16, 1, 0.0625, 0)] == pytest.approx([0.05, 0.05, 0.05 / 4, 0])


def test_learning_rates_by_width():
    assert [default_lr(width) for width in (64, 256, 1024, 4096)] == pytest.approx([0.05, 0.05, 0.025, 0.0125])


def test_the_last_fifty_steps_of_auto_fall_to_zero():
    found = run_auto([0.989, 0.98, *[0.98] * 20])  # gains 1.1 %, 0.9 %: the second is the last at the full rate
    assert found == pytest.approx([*[1.0] * 100, *(1 - done / 50 for done in range(50))])


def test_auto_stops_at_its_cap():
    assert len(run_auto(0.5**n for n in range(1, 1000))) == AUTO_STEPS


def test_auto_refines_until_it_has_settled(tiny_family, monkeypatch):
    monkeypatch.setattr(refining, "AUTO_STEPS", 250)
    plan = plan_of(tiny_family("llama"), refine="auto")
    _steps, step, tensors = first_step(plan)
    told = []
    refined = refine_layer(step, tensors, task_of(plan, progress=lambda layer, done, error: told.append(done)))
    assert told[: refined.steps // ROUND + 1] == list(range(0, refined.steps + 1, ROUND))
    assert 3 * ROUND <= refined.steps <= 250
    assert refined.after < 0.9 * refined.before


def test_batches_use_every_sequence_before_any_again():
    drawn = list(islice(sample_batches(32, seed=1, layer=2), 8))
    assert [len(batch) for batch in drawn] == [8] * 8
    for half in (drawn[:4], drawn[4:]):
        assert sorted(number for batch in half for number in batch) == list(range(32))
    assert drawn[:4] != drawn[4:]
    assert drawn != list(islice(sample_batches(32, seed=1, layer=3), 8))
    assert sorted(next(sample_batches(3, seed=0, layer=0))) == [0, 1, 2]


def test_paces_hold_the_constant_channels():
    module = "model.layers.0.self_attn"
    shapes = {
        "q_a_proj.weight": (5, 4),
        "q_a_proj.bias": (5,),
        "q_a_layernorm.weight": (5,),
        "q_b_proj.weight": (6, 5),
        "kv_a_proj_with_mqa.weight": (3 + 2, 4),
        "kv_a_proj_with_mqa.bias": (3 + 2,),
        "kv_a_layernorm.weight": (3,),
        "kv_b_proj.weight": (6, 3),
    }
    paces = lr_multipliers({f"{module}.{name}": torch.randn(shape) for name, shape in shapes.items()})
    found = {name.removeprefix(f"{module}."): pace for name, pace in paces.items()}
    assert found["kv_b_proj.weight"][0].tolist() == [1, 1, 1 / CONSTANT]
    assert found["q_b_proj.weight"][0].tolist() == [1, 1, 1, 1, 1 / CONSTANT]
    assert found["kv_a_proj_with_mqa.bias"].tolist() == [1, 1, 0, 1, 1]
    assert found["kv_a_proj_with_mqa.weight"].sum(1).tolist() == [4, 4, 0, 4, 4]
    assert found["q_a_proj.bias"].tolist() == [1, 1, 1, 1, 0]
    assert not found["kv_a_layernorm.weight"].any()
