"""Drift against stock models with plain hooks, of models against themselves, and with one layer
disturbed.
"""

import copy
import json
import math

import pytest
import torch
from helpers.attention import random_tokens, tiny_decoder
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvfold.attention import measure_drift
from kvfold.attention.drift.compare import margin, stretch_bounds

COMPARED = ("llama", "gemma2", "deepseek_v3")


@torch.no_grad()
def disturb(model: PreTrainedModel, scale: float = 0.1) -> PreTrainedModel:
    torch.manual_seed(7)
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        for weight in layer.self_attn.parameters():
            weight += scale * weight.std().nan_to_num() * torch.randn_like(weight)
    return other


def test_a_model_against_itself_is_exactly_zero_and_the_floor_is_not():
    model = tiny_decoder()
    report = measure_drift(model, copy.deepcopy(model), random_tokens(), batch=2)
    assert report.identical
    assert (report.kl, report.excess, report.agreement) == (0, 0, 1)
    assert (report.floor.dtype, report.floor.reference_dtype) == ("float32", "float64")
    for floor in report.floor.measured.layers:
        assert 1e-9 < floor.attention_local < 1e-5
        assert 1e-9 < floor.residual_propagated < 1e-5


@torch.no_grad()
def test_a_disturbed_layer_stands_out():
    model = tiny_decoder()
    student = copy.deepcopy(model)
    student.model.layers[1].self_attn.q_proj.weight[16:24] *= 1.1
    report = measure_drift(model, student, random_tokens())
    first, second, third = report.measured.layers
    assert first.attention_local == first.residual_propagated == 0
    assert second.attention_local > 1e-3
    assert second.row_kl > 0
    assert third.attention_local == third.residual_local == third.row_kl == 0
    assert third.attention_propagated > 1e-3
    assert report.kl > 1e3 * report.floor.measured.kl > 0


@torch.no_grad()
def test_rows_of_relabeled_heads_are_compared_with_their_own():
    model = tiny_decoder(num_key_value_heads=4)
    student = copy.deepcopy(model)
    attention = student.model.layers[1].self_attn
    order = [2, 0, 3, 1]
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.copy_(projection.weight.view(4, 8, 32)[order].flatten(0, 1))
    attention.o_proj.weight.copy_(attention.o_proj.weight.view(32, 4, 8)[:, order].flatten(1))
    layers = measure_drift(model, student, random_tokens(), floor=False).measured.layers
    assert max(layer.row_kl for layer in layers) < 1e-5


class Hooked:
    """A stock eager model run once with plain hooks: arguments of layers, outputs and maps of their
    attention, hidden states, and logits.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor) -> None:
        self.calls = []
        self.attentions = []
        handles = []
        for layer in model.model.layers:
            attention = layer.self_attn
            handles.append(layer.register_forward_pre_hook(self.enter, with_kwargs=True))
            handles.append(attention.register_forward_hook(self.leave))
        self.logits = model(tokens, use_cache=False).logits
        for handle in handles:
            handle.remove()

    def enter(self, layer, args, kwargs) -> None:
        self.calls.append((args[0], kwargs))

    def leave(self, attention, args, output) -> None:
        self.attentions.append(output)


def relative_error(expected: Tensor, actual: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("family", COMPARED)
@torch.no_grad()
def test_numbers_are_those_of_two_stock_models_with_hooks(family):
    source = tiny_decoder(family, attn_implementation="eager").double()
    tokens = random_tokens()
    student = disturb(source)
    teacher = Hooked(source, tokens)
    own = Hooked(student, tokens)
    measured = measure_drift(source, student, tokens, batch=2, floor=False).measured
    for index, layer in enumerate(measured.layers):
        local = []
        module = student.model.layers[index]
        handle = module.self_attn.register_forward_hook(
            lambda _, args, out, to=local: to.append(out)
        )
        hidden, arguments = teacher.calls[index]
        after = module(hidden, **arguments)
        handle.remove()
        output, maps = teacher.attentions[index]
        other, other_maps = local[0]
        expected = {
            "attention_local": relative_error(output, other),
            "attention_propagated": relative_error(output, own.attentions[index][0]),
        }
        # the last layer's result is hidden behind the final norm
        if index < 2:
            states = teacher.calls[index + 1][0]
            expected["residual_local"] = relative_error(states, after)
            expected["residual_propagated"] = relative_error(states, own.calls[index + 1][0])
        for name, error in expected.items():
            assert getattr(layer, name) == pytest.approx(error, rel=1e-9, abs=1e-12)
        # eager attention rounds its maps to float32
        rows = torch.where(other_maps > 0, maps * (maps / other_maps).log(), 0).sum(-1)
        assert layer.row_kl == pytest.approx(rows.mean().item(), rel=1e-4)
    log_p = teacher.logits[:, :-1].log_softmax(-1)
    log_q = own.logits[:, :-1].log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    assert measured.kl == pytest.approx(kl.item(), rel=1e-9)
    agreement = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean()
    assert measured.agreement == pytest.approx(agreement.item())
    losses = [model(tokens, labels=tokens).loss.item() for model in (source, student)]
    assert (measured.teacher_loss, measured.student_loss) == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(
    ("student", "comparable"),
    [
        (tiny_decoder(), True),
        (tiny_decoder(num_attention_heads=2, head_dim=16), False),
        (tiny_decoder("deepseek_v3"), True),
        (tiny_decoder("gemma2", sliding_window=3, layer_types=["sliding_attention"] * 3), False),
    ],
    ids=["GQA", "other heads", "MLA", "other mask"],
)
def test_rows_are_compared_where_they_correspond(student, comparable):
    source = tiny_decoder(num_key_value_heads=4)
    layer = measure_drift(source, student, random_tokens(), floor=False).measured.layers[1]
    assert (layer.row_kl is not None) == comparable
    assert layer.attention_local > 0


def test_the_floor_tells_rounding_from_conversion(tmp_path):
    source = tiny_decoder()
    student = disturb(source, 0.3)
    half = torch.bfloat16
    report = measure_drift(source, student, random_tokens(), dtype=half, floor_sequences=2)
    assert report.source_dtype == report.floor.dtype == "bfloat16"
    assert report.floor.sequences == 2
    for layer, floor in zip(report.measured.layers, report.floor.measured.layers, strict=True):
        assert 1e-3 < floor.attention_local < 0.05 < layer.attention_local
    # the source cast to bfloat16 is the student: drift and floor are the same thing
    source.save_pretrained(tmp_path)
    student = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=half)
    report = measure_drift(source, student, random_tokens())
    assert (report.floor.dtype, report.floor.reference_dtype) == ("bfloat16", "float32")
    assert report.kl == pytest.approx(report.floor.measured.kl, rel=1e-6)


def test_reports_are_deterministic_and_valid_json():
    source = tiny_decoder()
    tokens = random_tokens()
    student = disturb(source)
    steps = []
    report = measure_drift(source, student, tokens, progress=lambda *step: steps.append(step))
    assert steps == [(stage, layer, 3) for stage in ("compare", "floor") for layer in range(4)]
    assert measure_drift(source, student, tokens) == report
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["kl"]["value"] == report.kl
    assert content["kl"]["floor"] == report.floor.measured.kl
    assert content["layers"][1]["row_kl"]["value"] == report.measured.layers[1].row_kl
    # batches do not change the numbers
    single = measure_drift(source, student, tokens, batch=1, floor=False)
    assert single.kl == pytest.approx(report.kl, rel=1e-4)
    rows = [each.measured.layers[1].row_kl for each in (single, report)]
    assert rows[0] == pytest.approx(rows[1], rel=1e-4)
    with torch.no_grad():
        student.model.layers[1].self_attn.o_proj.weight[0, 0] = math.nan
    broken = measure_drift(source, student, tokens, floor=False)
    assert not broken.identical
    assert broken.to_dict()["kl"]["value"] is None


@pytest.mark.parametrize(("count", "quantile"), [(8, 2.3646), (101, 1.9840)])
def test_margins_are_those_of_students_t(count, quantile):
    values = torch.arange(count, dtype=torch.float64)
    expected = quantile * values.std().item() / math.sqrt(count)
    assert margin(values) == pytest.approx(expected, rel=5e-3)
    assert margin(values[:1]) is None


@torch.no_grad()
def test_figures_by_position_and_sequence_are_those_of_stock_losses(monkeypatch):
    assert stretch_bounds(300) == [(1, 64), (64, 128), (128, 256), (256, 300)]
    assert stretch_bounds(40) == [(1, 40)]
    monkeypatch.setattr("kvfold.attention.drift.compare._FIRST", 3)
    source = tiny_decoder()
    tokens = random_tokens()
    student = disturb(source)
    measured = measure_drift(source, student, tokens, floor=False, batch=2).measured
    log_p = source(tokens).logits[:, :-1].double().log_softmax(-1)
    log_q = student(tokens).logits[:, :-1].double().log_softmax(-1)
    excess = (log_p - log_q).gather(-1, tokens[:, 1:, None])[..., 0]
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert [(stretch.start, stretch.end) for stretch in measured.stretches] == [
        (1, 3),
        (3, 6),
        (6, 12),
    ]
    for figures in (measured, *measured.stretches):
        start = getattr(figures, "start", 1)
        span = slice(start - 1, getattr(figures, "end", 12) - 1)
        for name, values in (("excess", excess), ("kl", kl)):
            by_sequence = values[:, span].mean(1)
            assert getattr(figures, name) == pytest.approx(by_sequence.mean().item(), rel=1e-3)
            half_width = getattr(figures, f"{name}_margin")
            assert half_width == pytest.approx(margin(by_sequence), rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "tokens", "options"),
    [
        ({"num_hidden_layers": 2}, random_tokens(), {}),
        ({"vocab_size": 64}, random_tokens(), {}),
        ({}, random_tokens()[0], {}),
        ({}, random_tokens().float(), {}),
        ({}, random_tokens(), {"batch": 0}),
    ],
    ids=["depth", "vocabulary", "one sequence", "dtype", "batch"],
)
def test_what_cannot_be_compared_is_an_error(changes, tokens, options, refused):
    with refused(ValueError):
        measure_drift(tiny_decoder(), tiny_decoder(**changes), tokens, **options)


@pytest.mark.gpu
def test_a_loaded_model_is_measured_on_the_gpu_when_there_is_one():
    source = tiny_decoder()
    student = disturb(source)
    on_cpu = measure_drift(source, student, random_tokens(), device="cpu")
    on_gpu = measure_drift(source, student, random_tokens())
    assert (on_cpu.device, on_gpu.device) == ("cpu", "cuda")
    assert next(source.parameters()).device.type == "cpu"
    assert on_gpu.kl == pytest.approx(on_cpu.kl, rel=1e-3)
    for layer, other in zip(on_cpu.measured.layers, on_gpu.measured.layers, strict=True):
        assert other.attention_local == pytest.approx(layer.attention_local, rel=1e-3)
        assert other.row_kl == pytest.approx(layer.row_kl, rel=1e-3)
