"""Drift against stock models with plain hooks, on checkpoints against themselves, and with one head
disturbed.
"""

import copy
import json
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvfold.attention.drift.compare import margin, stretch_bounds
from kvfold.attention.drift.report import measure_drift
from tests.attention.drift.test_drift_streams import some_tokens as random_tokens
from tests.attention.drift.test_drift_streams import tiny

COMPARED = ("llama", "gemma2", "deepseek_v3")


def some_tokens() -> Tensor:
    return random_tokens(5, 12)


def disturbed(
    model: PreTrainedModel, scale: float = 0.1, layers: tuple[int, ...] = (0, 1, 2)
) -> PreTrainedModel:
    torch.manual_seed(7)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in layers:
            for weight in other.model.layers[layer].self_attn.parameters():
                weight += scale * weight.std().nan_to_num() * torch.randn_like(weight)
    return other


@pytest.mark.parametrize("family", COMPARED)
def test_a_model_against_itself_is_exactly_zero_and_the_floor_is_not(family):
    model = tiny(family)
    report = measure_drift(model, copy.deepcopy(model), some_tokens(), batch=2)
    assert report.identical
    assert (report.measured.kl, report.measured.excess, report.measured.agreement) == (0, 0, 1)
    for layer, floor in zip(report.measured.layers, report.floor.measured.layers, strict=True):
        assert layer.attention_local == layer.residual_propagated == layer.row_kl == 0
        assert [head.student_head for head in layer.heads] == [0, 1, 2, 3]
        assert all(head.error == head.row_kl == 0 for head in layer.heads)
        assert 1e-9 < floor.attention_local < 1e-5
        assert 1e-9 < floor.residual_propagated < 1e-5
    assert (report.floor.dtype, report.floor.reference_dtype) == ("float32", "float64")


def test_a_disturbed_head_stands_out():
    model = tiny()
    student = copy.deepcopy(model)
    with torch.no_grad():
        student.model.layers[1].self_attn.q_proj.weight[16:24] *= 1.1
    report = measure_drift(model, student, some_tokens())
    first, second, third = report.measured.layers
    assert first.attention_local == first.residual_propagated == 0
    assert third.attention_local == third.residual_local == third.row_kl == 0
    assert third.attention_propagated > 1e-3 < second.attention_local
    assert [head.head for head in second.heads if head.error > 0] == [2]
    assert second.row_kl == pytest.approx(second.heads[2].row_kl / 4)
    assert report.measured.kl > 1e3 * report.floor.measured.kl > 0


def test_heads_are_compared_by_what_they_contribute():
    """Neither their labels nor the basis of their values matter; a changed value head stands out,
    its rows do not.
    """
    model = tiny(num_key_value_heads=4)
    student = copy.deepcopy(model)
    order = [2, 0, 3, 1]  # head h of the student is the source's order[h]
    mix = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0))).Q
    first, second, third = (layer.self_attn for layer in student.model.layers)
    with torch.no_grad():
        first.v_proj.weight[:8] = mix @ first.v_proj.weight[:8]
        first.o_proj.weight[:, :8] = first.o_proj.weight[:, :8] @ mix.T
        for projection in (second.q_proj, second.k_proj, second.v_proj):
            projection.weight.copy_(projection.weight.view(4, 8, 32)[order].flatten(0, 1))
        second.o_proj.weight.copy_(second.o_proj.weight.view(32, 4, 8)[:, order].flatten(1))
        third.v_proj.weight[8:16] *= 1.5
    layers = measure_drift(model, student, some_tokens(), floor=False).measured.layers
    assert max(head.error for layer in layers[:2] for head in layer.heads) < 1e-5
    assert [order[head.student_head] for head in layers[1].heads] == [0, 1, 2, 3]
    assert [head.error for head in layers[2].heads] == pytest.approx([0, 0.5, 0, 0], abs=1e-5)
    assert max(head.row_kl for layer in layers for head in layer.heads) < 1e-5


class Hooked:
    """A stock eager model run once with plain hooks: inputs of layers, and outputs and maps of
    their attention.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor) -> None:
        self.calls = []
        self.attentions = []
        handles = []
        for layer in model.model.layers:
            handles += [
                layer.register_forward_pre_hook(
                    lambda _, args, kw: self.calls.append((args[0], kw)), with_kwargs=True
                ),
                layer.self_attn.register_forward_hook(
                    lambda _, args, out: self.attentions.append(out)
                ),
            ]
        self.logits = model(tokens, use_cache=False).logits
        self.hidden = [
            call[0] for call in self.calls[1:]
        ]  # the last layer's is hidden behind the final norm
        for handle in handles:
            handle.remove()


def relative(expected: Tensor, found: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("family", COMPARED)
@torch.no_grad()
def test_numbers_are_those_of_two_stock_models_with_hooks(family):
    source = tiny(family, attn_implementation="eager").double()
    tokens = some_tokens()
    student = disturbed(source)
    teacher = Hooked(source, tokens)
    own = Hooked(student, tokens)
    measured = measure_drift(source, student, tokens, batch=2, floor=False).measured
    close = {"rel": 1e-9, "abs": 1e-12}
    for index, layer in enumerate(measured.layers):
        hidden, arguments = teacher.calls[index]
        module = student.model.layers[index]
        seen = []
        handle = module.self_attn.register_forward_hook(
            lambda _, args, out, seen=seen: seen.append(out)
        )
        after = module(hidden, **arguments)
        handle.remove()
        expected, expected_maps = teacher.attentions[index]
        attention, maps = seen[0]
        pairs = {
            "attention_local": (expected, attention),
            "attention_propagated": (expected, own.attentions[index][0]),
        }
        if index < 2:
            pairs["residual_local"] = (teacher.hidden[index], after)
            pairs["residual_propagated"] = (teacher.hidden[index], own.hidden[index])
        for name, pair in pairs.items():
            assert getattr(layer, name) == pytest.approx(relative(*pair), **close)
        rows = torch.where(maps > 0, expected_maps * (expected_maps / maps).log(), 0).sum(-1)
        # eager attention rounds its maps to float32
        assert [head.row_kl for head in layer.heads] == pytest.approx(
            rows.mean((0, 2)).tolist(), rel=1e-4
        )
        assert layer.row_kl == pytest.approx(rows.mean().item(), rel=1e-4)
    log_p = teacher.logits[:, :-1].log_softmax(-1)
    log_q = own.logits[:, :-1].log_softmax(-1)
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="sum").item() / log_p[..., 0].numel()
    assert measured.kl == pytest.approx(kl, rel=1e-9)
    agreement = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean()
    assert measured.agreement == pytest.approx(agreement.item())
    losses = [model(tokens, labels=tokens).loss.item() for model in (source, student)]
    assert (measured.teacher_loss, measured.student_loss) == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "comparable"),
    [
        ({"num_key_value_heads": 2}, True),
        ({"num_attention_heads": 2, "head_dim": 16}, False),
        ({"family": "deepseek_v3"}, True),
    ],
)
def test_heads_and_rows_are_compared_where_they_correspond(changes, comparable):
    source = tiny(num_key_value_heads=4)
    layer = measure_drift(source, tiny(**changes), some_tokens(), floor=False).measured.layers[1]
    assert [head.head for head in layer.heads] == ([0, 1, 2, 3] if comparable else [])
    assert (layer.row_kl is not None) == comparable
    assert layer.attention_local > 0


def test_rows_over_other_positions_have_no_divergence():
    source = tiny("gemma2")  # every other layer has a window
    student = tiny("gemma2", sliding_window=3)
    layers = measure_drift(source, student, some_tokens(), floor=False).measured.layers
    assert [layer.row_kl is None for layer in layers] == [True, False, True]


def test_the_floor_is_that_of_the_coarser_dtype_and_tells_rounding_from_conversion(tmp_path):
    source = tiny()
    report = measure_drift(
        source, disturbed(source, 0.3), some_tokens(), dtype=torch.bfloat16, floor_sequences=2
    )
    assert (report.source_dtype, report.floor.dtype, report.floor.sequences) == (
        "bfloat16",
        "bfloat16",
        2,
    )
    for layer, floor in zip(report.measured.layers, report.floor.measured.layers, strict=True):
        assert 1e-3 < floor.attention_local < 0.05 < layer.attention_local
    # the source cast to bfloat16 is the student: drift and floor are the same thing
    source.save_pretrained(tmp_path)
    student = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    report = measure_drift(source, student, some_tokens())
    assert (report.floor.dtype, report.floor.reference_dtype) == ("bfloat16", "float32")
    assert report.measured.kl == pytest.approx(report.floor.measured.kl, rel=1e-6)


def test_reports_are_deterministic_and_valid_json():
    source = tiny()
    tokens = some_tokens()
    student = disturbed(source)
    steps = []
    first, second = (
        measure_drift(source, student, tokens, progress=lambda *step: steps.append(step))
        for _ in range(2)
    )
    assert steps == [(stage, done, 3) for stage in ("compare", "floor") for done in range(4)] * 2
    assert first == second
    content = json.loads(json.dumps(first.to_dict(), allow_nan=False))
    assert content["kl"]["value"] == first.measured.kl
    assert content["kl"]["floor"] == first.floor.measured.kl
    # batches do not change the numbers
    alone = measure_drift(source, student, tokens, batch=1, floor=False).measured
    assert alone.kl == pytest.approx(first.measured.kl, rel=1e-4)
    assert alone.layers[1].row_kl == pytest.approx(first.measured.layers[1].row_kl, rel=1e-4)
    with torch.no_grad():
        student.model.layers[1].self_attn.o_proj.weight[0, 0] = math.nan
    broken = measure_drift(source, student, tokens, floor=False)
    assert not broken.identical
    assert broken.to_dict()["kl"]["value"] is None


def test_margins_are_those_of_the_sequences():
    source = tiny()
    tokens = some_tokens()
    student = disturbed(source)
    whole = measure_drift(source, student, tokens, floor=False, batch=2).measured
    alone = [measure_drift(source, student, row[None], floor=False).measured for row in tokens]
    assert alone[0].excess_margin is None
    for name in ("kl", "excess"):
        values = torch.tensor([getattr(row, name) for row in alone], dtype=torch.float64)
        assert getattr(whole, name) == pytest.approx(values.mean().item())
        assert getattr(whole, f"{name}_margin") == pytest.approx(margin(values))
    # by Student's t
    for count, quantile in ((8, 2.3646), (101, 1.9840)):
        values = torch.arange(count, dtype=torch.float64)
        expected = quantile * values.std().item() / math.sqrt(count)
        assert margin(values) == pytest.approx(expected, rel=5e-3)


def test_stretches_of_positions_are_those_of_stock_losses(monkeypatch):
    assert stretch_bounds(300) == [(1, 64), (64, 128), (128, 256), (256, 300)]
    assert stretch_bounds(40) == [(1, 40)]
    monkeypatch.setattr("kvfold.attention.drift.compare._FIRST", 3)
    source = tiny()
    tokens = some_tokens()
    student = disturbed(source)
    stretches = measure_drift(source, student, tokens, floor=False, batch=2).measured.stretches
    assert [(stretch.start, stretch.end) for stretch in stretches] == [(1, 3), (3, 6), (6, 12)]
    with torch.no_grad():
        log_p, log_q = (
            model(tokens).logits[:, :-1].double().log_softmax(-1) for model in (source, student)
        )
    excess = (log_p - log_q).gather(-1, tokens[:, 1:, None])[..., 0]
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    for stretch in stretches:
        span = slice(stretch.start - 1, stretch.end - 1)
        for values, mean, width in (
            (excess, stretch.excess, stretch.excess_margin),
            (kl, stretch.kl, stretch.kl_margin),
        ):
            by_sequence = values[:, span].mean(1)
            assert mean == pytest.approx(by_sequence.mean().item(), rel=1e-3)
            assert width == pytest.approx(margin(by_sequence), rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "tokens", "options"),
    [
        ({"num_hidden_layers": 2}, some_tokens(), {}),
        ({"vocab_size": 64}, some_tokens(), {}),
        ({}, some_tokens()[0], {}),
        ({}, some_tokens().float(), {}),
        ({}, some_tokens(), {"batch": 0}),
    ],
    ids=["depth", "vocabulary", "one sequence", "dtype", "batch"],
)
def test_what_cannot_be_compared_is_an_error(changes, tokens, options, refused):
    with refused(ValueError):
        measure_drift(tiny(), tiny(**changes), tokens, **options)


@pytest.mark.gpu
def test_a_loaded_model_is_measured_on_the_gpu_when_there_is_one():
    source = tiny()
    student = disturbed(source)
    on_cpu = measure_drift(source, student, some_tokens(), device="cpu")
    on_gpu = measure_drift(source, student, some_tokens())
    assert (on_cpu.device, on_gpu.device) == ("cpu", "cuda")
    assert next(source.parameters()).device.type == "cpu"
    assert on_gpu.measured.kl == pytest.approx(on_cpu.measured.kl, rel=1e-3)
    for layer, other in zip(on_cpu.measured.layers, on_gpu.measured.layers, strict=True):
        assert other.attention_local == pytest.approx(layer.attention_local, rel=1e-3)
        assert other.row_kl == pytest.approx(layer.row_kl, rel=1e-3)
