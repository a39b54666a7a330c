"""The walk: statistics, choices and drift of a conversion, layer by layer, against whole stock
models.
"""

import pytest
import torch
from helpers import precision
from helpers.walks import Case
from torch.testing import assert_close

from kvfold.attention import measure_drift


@pytest.fixture
def case(monkeypatch):
    """In chunks of one sequence."""
    monkeypatch.setattr("kvfold.convert.walk.walk._CPU_TOKENS", 16)
    return Case()


def measured(case):
    walk = case.walk()
    list(case.run(walk))
    return walk.measure_drift()


def test_measurement_is_the_drift_of_whole_stock_models(case):
    found = measured(case)
    expected = measure_drift(case.source, case.student, case.held_out, floor=False)
    assert found.kl == pytest.approx(expected.kl, rel=1e-5)
    for figure in ("agreement", "teacher_loss", "student_loss"):
        assert getattr(found, figure) == pytest.approx(getattr(expected, figure))
    assert found.kl > 1e-3


def test_the_error_of_a_candidate_is_that_of_the_stock_attention(case):
    case.encode_layer = lambda index, _: case.layer(index)
    hidden = case.source(case.held_out, output_hidden_states=True).hidden_states
    for step in case.walk():
        inputs = case.source.model.layers[step.index].input_layernorm(hidden[step.index])
        rotary = case.source.model.rotary_emb(inputs, torch.arange(13)[None])
        expected, actual = (
            m.model.layers[step.index].self_attn(inputs, rotary, None)[0].double()
            for m in (case.source, case.student)
        )
        error = (expected - actual).square().sum() / expected.square().sum()
        assert step.measure_error(torch.empty(0)) == pytest.approx(float(error), rel=1e-4)
        step.advance_student(case.layer(step.index))


def test_an_unchanged_layer_is_the_sources(case):
    skipped = case.walk()
    one = case.walk()
    for step in skipped:
        assert all(map(torch.equal, step.teacher.calibration, step.calibration))
        step.advance_student_unchanged()
    for step in one:
        step.advance_student(case.layer(1)) if step.index == 1 else step.advance_student_unchanged()
    assert (skipped.measure_drift().kl, skipped.measure_drift().agreement) == (0, 1)
    assert 0 < one.measure_drift().kl < measured(case).kl


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
