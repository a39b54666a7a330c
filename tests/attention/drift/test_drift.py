"""Drift against stock models with plain hooks, and of models against themselves."""

import copy
import json
import math

import pytest
import torch
from helpers.attention import random_tokens, tiny_decoder
from helpers.layers import relative_error
from transformers import AutoModelForCausalLM

from kvfold.attention import measure_drift
from kvfold.attention.drift import compare
from kvfold.attention.drift.compare import compute_kl_terms, compute_margin, split_positions
from kvfold.attention.drift.streams import LoadedStream


@torch.no_grad()
def disturb(model, scale=0.1):
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
    for floor in report.floor.layers:
        assert 1e-9 < floor.attention_local < 1e-5
        assert 1e-9 < floor.residual_propagated < 1e-5


def test_progress_is_told_in_each_layer_and_in_each_block_of_logits(monkeypatch):
    model = tiny_decoder()
    tokens = random_tokens()
    block = 8  # tokens whose logits are computed at once
    monkeypatch.setattr(compare, "_CPU_LOGITS", block * model.config.vocab_size)
    calls = []
    measure_drift(
        model, model, tokens, batch=2, floor=False, progress=lambda *call: calls.append(call)
    )
    layers = [count for count, heads in calls if not heads]
    heads = [count for count, heads in calls if heads]
    assert sum(layers) == 2 * len(model.model.layers) * tokens.numel()
    assert sum(heads) == tokens[:, 1:].numel()
    assert max(heads) <= block


def run_stock(model, tokens):
    """The model's output, and the output of each layer's attention."""
    attentions = []
    handles = [
        layer.self_attn.register_forward_hook(lambda _, args, output: attentions.append(output[0]))
        for layer in model.model.layers
    ]
    output = model(tokens, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    return output, attentions


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
@torch.no_grad()
def test_numbers_are_those_of_stock_models_with_hooks(family):
    source = tiny_decoder(family, attn_implementation="eager").double()
    tokens = random_tokens()
    student = disturb(source)
    measured = measure_drift(source, student, tokens, batch=2, floor=False)
    teacher, attentions = run_stock(source, tokens)
    own, own_attentions = run_stock(student, tokens)
    for index, layer in enumerate(measured.layers):
        # local errors are those of the source with this layer of the student
        hybrid = copy.deepcopy(source)
        hybrid.model.layers[index] = student.model.layers[index]
        local, local_attentions = run_stock(hybrid, tokens)
        expected = {
            "attention_local": relative_error(local_attentions[index], attentions[index]),
            "attention_propagated": relative_error(own_attentions[index], attentions[index]),
        }
        # the last layer's result is hidden behind the final norm
        if index < 2:
            states, local_states, own_states = (
                model.hidden_states[index + 1] for model in (teacher, local, own)
            )
            expected["residual_local"] = relative_error(local_states, states)
            expected["residual_propagated"] = relative_error(own_states, states)
        for name, error in expected.items():
            assert getattr(layer, name) == pytest.approx(error, rel=1e-9, abs=1e-12)
    log_p = teacher.logits[:, :-1].log_softmax(-1)
    log_q = own.logits[:, :-1].log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    assert measured.kl == pytest.approx(kl.item(), rel=1e-9)
    agreement = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean()
    assert measured.agreement == pytest.approx(agreement.item())
    losses = [model(tokens, labels=tokens).loss.item() for model in (source, student)]
    assert (measured.teacher_loss, measured.student_loss) == pytest.approx(losses, rel=1e-6)


def test_the_floor_of_a_model_cast_to_bfloat16_is_its_drift(tmp_path):
    source = tiny_decoder()
    source.save_pretrained(tmp_path)
    student = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    report = measure_drift(source, student, random_tokens())
    assert report.kl == pytest.approx(report.floor.kl, rel=1e-6)
    assert 1e-3 < report.floor.layers[0].attention_local < 0.05


def test_reports_are_deterministic_and_valid_json():
    source = tiny_decoder()
    tokens = random_tokens()
    student = disturb(source)
    report = measure_drift(source, student, tokens)
    assert measure_drift(source, student, tokens) == report
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["kl"]["value"] == report.kl
    assert content["kl"]["floor"] == report.floor.kl
    assert content["layers"][1]["attention_local"]["value"] == report.layers[1].attention_local
    # batches do not change the numbers
    single = measure_drift(source, student, tokens, batch=1, floor=False)
    assert single.kl == pytest.approx(report.kl, rel=1e-4)
    with torch.no_grad():
        student.model.layers[1].self_attn.o_proj.weight[0, 0] = math.nan
    broken = measure_drift(source, student, tokens, floor=False)
    assert not broken.identical
    assert broken.to_dict()["kl"]["value"] is None


@pytest.mark.parametrize(("count", "quantile"), [(8, 2.3646), (101, 1.9840)])
def test_margins_are_those_of_students_t(count, quantile):
    values = torch.arange(count, dtype=torch.float64)
    expected = quantile * values.std().item() / math.sqrt(count)
    assert compute_margin(values) == pytest.approx(expected, rel=5e-3)
    assert compute_margin(values[:1]) is None


@pytest.mark.parametrize("tokens_at_once", [1, 3, 1000])
@torch.no_grad()
def test_figures_by_position_and_sequence_are_those_of_stock_losses(monkeypatch, tokens_at_once):
    assert split_positions(300) == [(1, 64), (64, 128), (128, 256), (256, 300)]
    assert split_positions(40) == [(1, 40)]
    monkeypatch.setattr("kvfold.attention.drift.compare._FIRST", 3)
    source = tiny_decoder()
    tokens = random_tokens()
    student = disturb(source)
    at_once = tokens_at_once * source.config.vocab_size
    monkeypatch.setattr("kvfold.attention.drift.compare._CPU_LOGITS", at_once)
    sizes = []
    compute_logits = LoadedStream.compute_logits

    def record_size(*given):
        logits = compute_logits(*given)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(LoadedStream, "compute_logits", record_size)
    measured = measure_drift(source, student, tokens, floor=False, batch=2)
    assert max(sizes) <= at_once
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
            assert half_width == pytest.approx(compute_margin(by_sequence), rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "tokens", "options"),
    [
        ({"num_hidden_layers": 2}, random_tokens(), {}),
        ({"vocab_size": 64}, random_tokens(), {}),
        ({}, random_tokens()[0], {}),
        ({}, random_tokens().float(), {}),
        ({}, random_tokens(), {"batch": 0}),
    ],
)
def test_what_cannot_be_compared_is_an_error(changes, tokens, options, refused):
    with refused(kind=ValueError):
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


def test_divergences_of_near_and_far_distributions_keep_their_digits():
    near = torch.randn(4, 61)
    log_p = (near * (1 + 1e-4)).double().log_softmax(-1)
    log_q = near.double().log_softmax(-1)
    exact = compute_kl_terms(log_p, log_q).sum(-1)
    # below what a sum of p log(p / q) in float32 could tell from zero
    assert (exact < 1e-7).all()
    narrow = (near * (1 + 1e-4)).log_softmax(-1), near.log_softmax(-1)
    torch.testing.assert_close(compute_kl_terms(*narrow).sum(-1).double(), exact, rtol=0.1, atol=0)
    assert compute_kl_terms(log_p, log_p).sum() == 0
    # one token has the whole of p and the other, far below float32's smallest number, of q
    far = torch.tensor([0.0, -200.0])
    assert compute_kl_terms(far, far.flip(0)).sum().item() == pytest.approx(200)
