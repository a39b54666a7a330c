"""Conversions that read text, end to end on small trained and random models."""

import math
import shutil
from unittest.mock import Mock

import pytest
import torch
from helpers import checkpoints
from helpers.checkpoints import assert_same_tensors, edit_json, read_json
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.attention import measure_drift
from kvfold.convert.conversion import splits
from kvfold.convert.data import demo_folder, read_text
from kvfold.convert.errors import InputError
from kvfold.convert.measure.losses import (
    compute_token_losses,
    cut_token_windows,
    measure_perplexity,
)
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.text.windows import load_calibration

QUICK = {"samples": 16, "seq_len": 64, "quiet": True}
LITTLE = {"samples": 4, "seq_len": 32}
FOLD = {"to": "gqa", "kv_heads": 2}
LATENT = {"to": "mla", "kv_rank": 32, "rope_dim": 32}


DEMO = demo_folder()


def convert(out, model=DEMO, **options):
    return checkpoints.run_conversion(model, out, **{**QUICK, **options})


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    out = tmp_path_factory.mktemp("folded") / "out"
    convert(out, **FOLD)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("target", "baseline"), [(FOLD, "mean"), (LATENT, "svd")])
def test_principal_loses_a_fraction_of_what_methods_without_text_lose(
    tmp_path, folded, target, baseline
):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    held_out = cut_token_windows(tokenizer, read_text("held_out"), 8, 128)
    convert(tmp_path / "plain", **target, method=baseline)
    if target is LATENT:
        convert(folded := tmp_path / "out", **target)
    folders = DEMO, tmp_path / "plain", folded
    source, plain, principal = (measure_perplexity(folder, held_out) for folder in folders)
    assert source < principal < source + (plain - source) / 3


def test_the_loss_by_position_is_measured_beyond_the_length_of_the_calibration(folded):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokens = load_calibration(
        [(None, 1.0)], tokenizer, QUICK["samples"], QUICK["seq_len"], long_length=512, long_count=1
    ).long
    models = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (DEMO, folded)
    )
    before, after = (compute_token_losses(model, tokens).double() for model in models)
    stretches = read_json(folded / "kvfold.json")["drift"]["excess_by_position"]
    assert [each["end"] for each in stretches] == [64, 128, 256, 512]
    for each in stretches:
        part = slice(each["start"] - 1, each["end"] - 1)
        assert each["excess"] == pytest.approx((after - before)[:, part].mean().item(), abs=2e-4)
        assert each["sequences"] == 1  # of a fit of seconds
    assert "By position, on 1 x 512 tokens:" in (folded / "README.md").read_text()


def test_the_recorded_drift_is_that_of_the_written_files(folded):
    """The walk measures it before the files are complete."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokens = load_calibration([(None, 1.0)], tokenizer, QUICK["samples"], QUICK["seq_len"]).held_out
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (DEMO, folded)
    ]
    measured = measure_drift(*models, tokens, device="cpu", floor=False).to_dict()
    recorded = read_json(folded / "kvfold.json")["drift"]
    assert recorded["kl"]["value"] == pytest.approx(measured["kl"]["value"], rel=1e-4)
    for layer, wanted in zip(recorded["layers"], measured["layers"], strict=True):
        for name, value in wanted.items():
            assert layer[name]["value"] == pytest.approx(value["value"], rel=1e-4), name


def test_a_failing_measurement_of_long_sequences_does_not_cost_the_run(
    out, tiny_reader, monkeypatch, capsys
):
    embed = CheckpointStream.embed

    def overflow(self, tokens):
        return embed(self, tokens) * (math.inf if tokens.shape[1] > QUICK["seq_len"] else 1)

    monkeypatch.setattr(CheckpointStream, "embed", overflow)
    done = convert(out, tiny_reader, to="mqa")
    assert done.drift.stretches[-1].end == QUICK["seq_len"]
    assert math.isfinite(done.drift.stretches[-1].excess)
    assert "the loss by position ends at 64 tokens: calibration text" in capsys.readouterr().err


def test_a_calibrated_run_records_its_groups_and_its_drift(folded):
    record = read_json(folded / "kvfold.json")
    for groups in record["groups"]:
        assert sorted(head for group in groups for head in group) == list(range(8))
    # similar is the default
    assert any(groups != [[0, 1, 2, 3], [4, 5, 6, 7]] for groups in record["groups"])
    assert (record["calibration"]["sequences"], record["calibration"]["held_out"]) == (16, 8)
    assert 1e-3 < record["drift"]["kl"]["value"] < 0.5
    assert record["drift"]["kl"]["floor"] < 1e-6


def test_a_length_beyond_the_context_is_refused_before_any_work(tmp_path, refused):
    with refused(field="seq_len"):
        convert(tmp_path / "out", to="mqa", seq_len=4096)
    assert not list(tmp_path.iterdir())


def test_a_model_without_tokenizer_is_refused(out, tiny_family):
    with pytest.raises(InputError, match="calibration needs the model's tokenizer"):
        convert(out, model=tiny_family("llama"), to="mqa")


@pytest.fixture(scope="module")
def split(tmp_path_factory, tiny_reader):
    """The record of a run with a budget, its config, and the steps of its progress."""
    out = tmp_path_factory.mktemp("split") / "out"
    steps = []
    done = convert(
        out, tiny_reader, progress=lambda *step: steps.append(step), to="mla", budget=8, **LITTLE
    )
    return done.record, read_json(out / "config.json"), steps


def test_a_budget_takes_the_split_that_drifts_least(split):
    record, config, steps = split
    assert [each["rope_dim"] for each in record["splits"]] == [2, 4, 6]
    best = min(record["splits"], key=lambda each: each["kl"])
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (
        best["kv_rank"],
        best["rope_dim"],
    )
    assert record["drift"]["kl"]["value"] == pytest.approx(best["kl"], rel=1e-6)
    assert [step[1:] for step in steps if step[0] == "splits"] == [(done, 3) for done in range(4)]
    ends = {stage: (done, total) for stage, done, total in steps}
    assert all(done == total for done, total in ends.values()), ends


@pytest.mark.slow
def test_a_budget_is_judged_by_what_refinement_reaches(tmp_path, split, tiny_reader, monkeypatch):
    monkeypatch.setattr(splits, "_TRIAL_STEPS", 2)
    monkeypatch.setattr(splits, "FINALISTS", 2)
    done = convert(tmp_path / "refined", model=tiny_reader, to="mla", budget=8, refine=1, **LITTLE)
    refined = done.record["splits"]
    assert [each["kl"] for each in refined] == [each["kl"] for each in split[0]["splits"]]
    finals = [each for each in refined if "refined_kl" in each]
    assert finals == [
        each for each in refined if each in sorted(refined, key=lambda each: each["kl"])[:2]
    ]
    assert all(each["refined_kl"] != each["kl"] for each in finals)
    best = min(finals, key=lambda each: each["refined_kl"])
    assert done.plan.mla_spec.rope_dim == best["rope_dim"]


def trial(rank, rope, kl, engines=1, refined_kl=None):
    """A trial of a split that so many ``engines`` serve."""
    support = [Mock(engine=str(number), serves=True) for number in range(engines)]
    plan = Mock(engines=support, mla_spec=Mock(kv_rank=rank, rope_dim=rope))
    return splits.SplitTrial(plan, kl, refined_kl)


@pytest.mark.parametrize(
    ("served", "best", "taken"), [(0.0104, 0.0100, 2), (0.0106, 0.0100, 0), (math.nan, math.nan, 1)]
)
def test_a_split_that_more_engines_serve_is_taken_where_it_costs_at_most_5_percent(
    served, best, taken
):
    trials = [trial(448, 128, best), trial(384, 192, 0.02), trial(512, 64, served, engines=2)]
    assert splits.choose_best_trial(trials) is trials[taken]
    # A refined drift comes before one as fitted.
    refined = [trial(384, 192, 0.5, refined_kl=0.4), trial(320, 256, 0.6, refined_kl=0.3)]
    assert splits.choose_best_trial([*trials, *refined]) is refined[1]


ROPE = {"rope_theta": 700.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def test_dynamic_rope_is_folded_as_the_rope_of_short_texts_that_it_is(tiny_reader, tmp_path):
    """Up to ``max_position_embeddings`` tokens the two are one model, so that every weight comes
    out the same.
    """
    outs = []
    for name, rope in (("dynamic", DYNAMIC | ROPE), ("plain", {"rope_type": "default"} | ROPE)):
        model = shutil.copytree(tiny_reader, tmp_path / name)
        outs.append(tmp_path / f"{name}-folded")
        edit_json(model / "config.json", rope_parameters=rope)
        convert(outs[-1], model, to="mqa", positions=False, **LITTLE)
        assert read_json(outs[-1] / "config.json")["rope_parameters"] == rope
    assert_same_tensors(*outs)


def test_a_chat_model_also_calibrates_on_dialogues_that_it_writes(tiny_reader, tmp_path):
    model = shutil.copytree(tiny_reader, tmp_path / "model")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    done = convert(tmp_path / "out", model, to="mqa", group="contiguous", positions=False, **LITTLE)
    text = done.record["calibration"]
    drift = done.record["drift"]
    assert text["source"] == "the built-in standard-library text + self:0.5"
    assert [row["sequences"] for row in drift["texts"]] == [3, 5]
    assert sum(row["kl"] * row["sequences"] for row in drift["texts"]) == pytest.approx(
        8 * done.drift.kl
    )
    assert "by text" in done.summary()
    assert done.drift.stretches[-1].end == LITTLE["seq_len"]  # for want of positions
