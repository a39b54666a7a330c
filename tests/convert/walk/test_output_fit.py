"""The output projection of a converted layer, fitted on the student's stream."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.convert.checkpoint.shards import OutputTensor
from kvfold.convert.checkpoint.tensors import dtype_name
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.transforms.weights import AttentionWeights
from kvfold.convert.walk.output_fit import UNCHANGED, AttentionUpdate, refit_output
from kvfold.convert.walk.walk import Step, Student, Teacher, Walk

E, H, D = 32, 4, 8


def named(layer: int, weights: AttentionWeights) -> dict[str, Tensor]:
    parts = {"q": weights.q.flatten(0, 1), "k": weights.k.flatten(0, 1), "v": weights.v.flatten(0, 1)}
    parts["o"] = weights.o.flatten(1)
    return {f"model.layers.{layer}.self_attn.{name}_proj.weight": tensor for name, tensor in parts.items()}


class Case:
    """A random model of two layers, and its attention as a student that may differ from it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=61, hidden_size=E, intermediate_size=48, num_hidden_layers=2, num_attention_heads=H
        )
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
        self.tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.source = CheckpointStream(config.to_dict(), self.tensors.__getitem__, self.tensors)
        planned = [
            OutputTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape), None if "self_attn" in name else name)
            for name, tensor in self.tensors.items()
        ]
        twin = Student(self.source, config.to_dict(), planned)
        tokens = torch.randint(0, 61, (40, 12))
        teacher = Teacher(self.source, tokens[:8], tokens[8:], statistics=False, keep_calibration=True)
        self.walk = Walk(teacher, twin)

    def first_step(self) -> Step:
        self.steps = iter(self.walk)  # a generator that is dropped closes its layer
        return next(self.steps)

    def weights(self, layer: int) -> AttentionWeights:
        q, k, v, o = (self.tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkvo")
        return AttentionWeights(*(rows.view(H, D, E) for rows in (q, k, v)), o.view(E, H, D))

    def refit(self, step: Step, weights: AttentionWeights, update: AttentionUpdate = UNCHANGED):
        found, fit = refit_output(step, weights, lambda changed: named(step.index, changed), update)
        assert (fit is None) == (update != UNCHANGED)
        return found, fit


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_layer_makes_up_for_its_own_values(case: Case) -> None:
    step = case.first_step()
    source = case.weights(0)
    other = replace(source, v=source.v * 1.5)
    found, fit = case.refit(step, other)
    assert fit.after < 0.2 * fit.before
    before, after = (step.attention_error(named(0, each)) for each in (other, found))
    assert after < 0.2 * before


def test_a_layer_makes_up_for_those_before_it(case: Case) -> None:
    for step in case.walk:
        if step.index == 0:
            broken = case.weights(0)
            step.convert(named(0, replace(broken, v=broken.v + 0.2 * torch.randn_like(broken.v))))
            continue
        source = case.weights(1)
        found, fit = case.refit(step, source)
        assert 0 < fit.after < fit.before
        assert not torch.equal(found.o, source.o)
        assert torch.equal(found.v, source.v)
        break


def test_an_exact_layer_stays_as_it_is(case: Case) -> None:
    source = case.weights(0)
    found, fit = case.refit(case.first_step(), source)
    assert fit.before == pytest.approx(0, abs=1e-10)
    torch.testing.assert_close(found.o, source.o, rtol=1e-4, atol=1e-5)


def test_what_does_not_help_held_out_sequences_is_not_kept(case: Case) -> None:
    step = case.first_step()
    step.calibration[:] = [chunk.flip(0) for chunk in step.calibration]  # the targets are those of other sequences
    source = case.weights(0)
    found, fit = case.refit(step, source)
    assert found is source
    assert fit.after == fit.before


def test_a_normed_output_is_left_alone(case: Case) -> None:
    source = case.weights(0)
    assert case.refit(case.first_step(), source, AttentionUpdate(norm="norm")) == (source, None)


def test_massive_tokens_of_the_student_alone_do_not_rule(case: Case) -> None:
    """A thousand times as large: no projection takes them back, and the other tokens are fitted as before."""
    step = case.first_step()
    for hidden in (step.student_calibration, step.student_held_out):
        for chunk in hidden:
            chunk[:, -1] *= 1000  # the last token: no other attends to it
    source = case.weights(0)
    other = replace(source, v=source.v * 1.5)
    found, fit = case.refit(step, other)
    assert fit.after < fit.before
    left, right = found.o.flatten(1), source.o.flatten(1) / 1.5
    assert (left - right).norm() < 0.25 * right.norm()  # 0.5 before the fit
