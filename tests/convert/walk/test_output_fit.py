"""The output projection of a converted layer, fitted on the student's stream."""

from dataclasses import replace

import pytest
import torch
from helpers.walks import LAYERS, Case

from kvfold.attention.drift.compare import sum_squares
from kvfold.convert.transforms.weights import AttentionWeights
from kvfold.convert.walk.output_fit import UNCHANGED, AttentionUpdate, refit_output_projection


def named(layer, weights):
    parts = {name: getattr(weights, name).flatten(0, 1) for name in "qkv"} | {
        "o": weights.o.flatten(1)
    }
    return {
        f"model.layers.{layer}.self_attn.{name}_proj.weight": tensor
        for name, tensor in parts.items()
    }


@pytest.fixture
def case():
    """A student of the same shape: its attention is the source's until a test changes it."""
    return Case(kv_heads=4, sequences=32)


@pytest.fixture
def step(case):
    case.encode_layer = named
    steps = iter(case.walk(statistics_from=LAYERS))
    yield next(steps)
    steps.close()


def weights_of(case, layer=0):
    q, k, v, o = (
        case.stored[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkvo"
    )
    return AttentionWeights(*(rows.view(4, 8, 32) for rows in (q, k, v)), o.view(32, 4, 8))


def test_a_layer_makes_up_for_its_own_values(case, step):
    source = weights_of(case)
    other = replace(source, v=source.v * 1.5)
    fitted = refit_output_projection(step, other, UNCHANGED)
    assert step.measure_error(fitted) < 0.2 * step.measure_error(other)


def test_a_layer_makes_up_for_those_before_it(case):
    case.encode_layer = named
    left = {}
    for fits in (True, False):
        steps = iter(case.walk(statistics_from=LAYERS))
        broken = weights_of(case)
        torch.manual_seed(0)
        noise = 0.2 * torch.randn_like(broken.v)
        next(steps).advance_student(named(0, replace(broken, v=broken.v + noise)))
        step = next(steps)
        source = weights_of(case, 1)
        fitted = refit_output_projection(step, source, UNCHANGED) if fits else source
        assert torch.equal(fitted.v, source.v)
        step.advance_student(named(1, fitted))
        states = [output.states for output in step.teacher.outputs]
        left[fits] = sum(map(sum_squares, map(torch.sub, states, step.held_out)))
    assert left[True] < left[False]


def test_an_exact_layer_stays_as_it_is(case, step):
    source = weights_of(case)
    fitted = refit_output_projection(step, source, UNCHANGED)
    torch.testing.assert_close(fitted.o, source.o, rtol=1e-4, atol=1e-5)


def test_what_does_not_help_held_out_sequences_is_not_kept(case, step):
    step.teacher.calibration[:] = [
        chunk.flip(0) for chunk in step.teacher.calibration
    ]  # the targets are those of other sequences
    source = weights_of(case)
    assert refit_output_projection(step, source, UNCHANGED) is source


def test_a_layer_is_fitted_through_the_norm_behind_it(case, step):
    """The norm undoes any common scale of the heads' results, but not one for each dim."""
    update = AttentionUpdate(norm="post_attention_layernorm")
    source = weights_of(case)
    stretch = torch.linspace(0.25, 2, 8)[:, None]
    other = replace(source, v=source.v * stretch)

    def measure(weights):
        step.student.set_layer_tensors(named(0, weights))
        with step.student.stream.open_layer(0) as layer:
            updates = [
                [update.compute_update(layer, output.attention) for output in outputs]
                for outputs in (map(layer.attend, step.held_out), step.teacher.outputs)
            ]
        return sum(map(sum_squares, map(torch.sub, *updates)))

    fitted = refit_output_projection(step, other, update)
    assert measure(fitted) < 0.2 * measure(other)


def test_massive_tokens_of_the_student_alone_do_not_rule(case, step):
    """A thousand times as large: no projection takes them back, and the other tokens are fitted as
    before.
    """
    for hidden in (step.calibration, step.held_out):
        for chunk in hidden:
            chunk[:, -1] *= 1000  # the last token: no other attends to it
    source = weights_of(case)
    fitted = refit_output_projection(step, replace(source, v=source.v * 1.5), UNCHANGED)
    left = fitted.o.flatten(1)
    right = source.o.flatten(1) / 1.5
    assert (left - right).norm() < 0.25 * right.norm()  # 0.5 before the fit
