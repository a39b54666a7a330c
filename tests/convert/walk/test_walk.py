"""The walk: statistics, choices and drift of a conversion, layer by layer, against whole stock
models.
"""

import pytest
import torch
from helpers import precision
from helpers.walks import Case
from torch.testing import assert_close

from kvfold.convert.walk.walk import Step, Teacher, Walk


@pytest.fixture
def case(monkeypatch):
    """In chunks of one sequence."""
    monkeypatch.setattr("kvfold.convert.walk.walk._CPU_TOKENS", 16)
    return Case()


def test_students_that_share_a_teacher_are_what_each_would_be_alone(case):
    source = case.stream()
    alone = case.walk()
    list(case.run(alone))
    teacher = Teacher(source, case.held_out, case.calibration)
    walks = [Walk(teacher, case.converted(source)) for _ in range(2)]
    for layer in teacher.layers():
        for walk in walks:
            Step(layer, walk).advance(case.layer(layer.index))
    assert [walk.measurement() for walk in walks] == [alone.measurement()] * 2


def test_layers_that_are_finished_need_no_statistics(case):
    walk = case.walk(statistics_from=1)
    steps = list(case.run(walk))
    assert [step.statistics is None for step in steps] == [True, False, False]
    whole = case.walk()
    list(case.run(whole))
    assert walk.measurement() == whole.measurement()


def measured(case):
    walk = case.walk()
    list(case.run(walk))
    return walk.measurement()


def test_measurement_equals_two_whole_stock_models(case):
    found = measured(case)
    labels = case.held_out[:, 1:]
    log_p, log_q = (
        m(case.held_out).logits[:, :-1].double().log_softmax(-1)
        for m in (case.source, case.student)
    )
    assert found.kl == pytest.approx(
        float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-5
    )
    assert found.agreement == pytest.approx(
        float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean())
    )
    assert found.teacher_loss == pytest.approx(
        -float(log_p.gather(-1, labels[..., None]).mean()), rel=1e-6
    )
    assert found.student_loss == pytest.approx(
        -float(log_q.gather(-1, labels[..., None]).mean()), rel=1e-6
    )
    assert found.kl > 1e-3


def test_the_error_of_a_candidate_is_that_of_the_stock_attention(case):
    case.encode_layer = lambda index, tensors: tensors
    hidden = case.source(case.held_out, output_hidden_states=True).hidden_states
    for step in case.walk():
        inputs = case.source.model.layers[step.index].input_layernorm(hidden[step.index])
        rotary = case.source.model.rotary_emb(inputs, torch.arange(13)[None])
        expected, actual = (
            m.model.layers[step.index].self_attn(inputs, rotary, None)[0].double()
            for m in (case.source, case.student)
        )
        error = (expected - actual).square().sum() / expected.square().sum()
        assert step.error(case.layer(step.index)) == pytest.approx(float(error), rel=1e-4)
        step.advance(case.layer(step.index))


def test_an_unchanged_layer_is_the_sources(case):
    skipped = case.walk()
    one = case.walk()
    for step in skipped:
        assert all(map(torch.equal, step.teacher.calibration, step.calibration))
        step.advance_unchanged()
    for step in one:
        step.advance(case.layer(1)) if step.index == 1 else step.advance_unchanged()
    assert (skipped.measurement().kl, skipped.measurement().agreement) == (0, 1)
    assert 0 < one.measurement().kl < measured(case).kl


def test_what_is_measured_is_what_will_be_stored(monkeypatch):
    case = Case(dtype=torch.bfloat16)
    rounded = {name: tensor.clone() for name, tensor in case.new.items()}
    precise = {name: tensor.float() * (1 + 2**-12) for name, tensor in rounded.items()}
    assert all(torch.equal(tensor.bfloat16(), rounded[name]) for name, tensor in precise.items())
    expected = measured(case)
    monkeypatch.setattr(
        case, "layer", lambda index: {n: t for n, t in precise.items() if f".layers.{index}." in n}
    )
    assert measured(case) == expected


def test_refinement_gets_both_streams_inputs(case):
    teacher, student = (
        m(case.calibration, output_hidden_states=True).hidden_states
        for m in (case.source, case.student)
    )
    for step in case.run(case.walk()):
        assert_close(torch.cat(step.teacher.calibration), teacher[step.index], **precision.LOGITS)
        assert_close(torch.cat(step.calibration), student[step.index], **precision.LOGITS)
