"""Conversions that read text, end to end on small trained and random models."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
from helpers.checkpoints import stock_model, tensors
from transformers import AutoTokenizer

from kvfold.convert import ConvertRequest, convert_checkpoint, sweep_checkpoint
from kvfold.convert.conversion import splits
from kvfold.convert.data import demo_folder, read_text
from kvfold.convert.errors import InputError
from kvfold.convert.families.model import model_of
from kvfold.convert.measure.losses import checkpoint_perplexity, token_windows
from kvfold.convert.methods.registry import Fitted
from kvfold.convert.progress import Stages
from kvfold.convert.targets.engines import latent_result_of, verdicts
from kvfold.convert.targets.mla.config import LatentTarget
from kvfold.convert.text.windows import CalibrationTokens

QUICK = {"samples": 16, "seq_len": 128, "quiet": True}
BUDGET = {"to": "mla", "budget": 16, "samples": 8, "seq_len": 64}


def convert(out, **options):
    model = options.pop("model", demo_folder())
    return convert_checkpoint(ConvertRequest(model=str(model), out=str(out), **{**QUICK, **options}))


@pytest.fixture(scope="module")
def held_out():
    return token_windows(AutoTokenizer.from_pretrained(demo_folder()), read_text("held_out"), 8, 128)


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    out = tmp_path_factory.mktemp("folded") / "out"
    convert(out, to="gqa", kv_heads=2, group="contiguous")
    return out


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    out = tmp_path_factory.mktemp("latent") / "out"
    convert(out, to="mla", kv_rank=32, rope_dim=32)
    return out


def test_principal_loses_a_fraction_of_what_mean_pooling_loses(tmp_path, folded, held_out):
    convert(tmp_path / "mean", to="gqa", kv_heads=2, method="mean")
    source, mean, principal = (
        checkpoint_perplexity(folder, held_out) for folder in (demo_folder(), tmp_path / "mean", folded)
    )
    assert source < principal < source + (mean - source) / 3


@pytest.mark.slow
def test_principal_is_the_default_and_similar_its_grouping(tmp_path):
    record = convert(tmp_path / "out", to="gqa", kv_heads=4).record
    assert record["request"]["method"] == "principal"
    for groups in record["groups"]:
        assert sorted(head for group in groups for head in group) == list(range(8))
        assert {len(group) for group in groups} == {2}
    assert any(groups != [[0, 1], [2, 3], [4, 5], [6, 7]] for groups in record["groups"])


def test_a_calibrated_run_records_its_drift(folded, held_out):
    record = json.loads((folded / "kvfold.json").read_text())
    assert record["calibration"]["sequences"] == 16
    assert record["calibration"]["held_out"] == 8
    drift = record["drift"]
    assert len(drift["layers"]) == 4
    assert drift["cache_bytes_per_token"] == {"source": 4096, "student": 1024}
    assert 1e-3 < drift["kl"]["value"] < 0.5
    assert drift["kl"]["floor"] < 1e-6
    card = (folded / "README.md").read_text()
    assert f"{drift['kl']['value']:.4f}" in card


def test_text_of_ones_own(tmp_path):
    text = tmp_path / "own.txt"
    text.write_text(read_text("train")[:200_000])
    record = convert(tmp_path / "out", to="mqa", calibration=str(text), samples=2, seq_len=16).record
    assert record["calibration"]["source"] == "own.txt"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 100_000}, "too little text"),
        ({"seq_len": 4096}, "--seq-len 4096: longer than the 512 positions"),
        ({"calibration": "nowhere.txt"}, "--calibration: no file nowhere.txt"),
        ({"device": "cuda"}, "--device cuda: torch finds no CUDA device"),
    ],
)
def test_what_calibration_refuses(tmp_path, options, message):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(InputError, match=message):
        convert(tmp_path / "out", to="mqa", **options)
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_tokenizer_cannot_calibrate(tmp_path, tiny_family):
    with pytest.raises(InputError, match="calibration needs the model's tokenizer"):
        convert(tmp_path / "out", model=tiny_family("llama"), to="mqa")


def test_latent_checkpoints_are_of_a_stock_class(latent, held_out):
    model = stock_model(latent, dtype=torch.float32)
    assert type(model).__name__ == "YoutuForCausalLM"
    cache = model(held_out[:1]).past_key_values
    held = sum(tensor.numel() for layer in cache.layers for tensor in (layer.keys, layer.values))
    record = json.loads((latent / "kvfold.json").read_text())
    assert record["cache_elements_per_token_per_layer"] == {"from": 512, "to": 64}
    assert held == 64 * held_out.shape[1] * 4


def test_latent_loses_less_calibrated_than_by_svd(tmp_path, latent, held_out):
    convert(tmp_path / "svd", to="mla", kv_rank=32, rope_dim=32, method="svd")
    source, svd, principal = (
        checkpoint_perplexity(folder, held_out) for folder in (demo_folder(), tmp_path / "svd", latent)
    )
    assert source < principal < source + (svd - source) / 2


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """The folder of a run with a budget, and the steps of its progress."""
    out, steps = tmp_path_factory.mktemp("split") / "out", []
    request = ConvertRequest(model=str(demo_folder()), out=str(out), **BUDGET, quiet=True)
    convert_checkpoint(request, progress=lambda *step: steps.append(step))
    return out, steps


@pytest.mark.slow
def test_a_budget_takes_the_split_that_drifts_least(split):
    record = json.loads((split[0] / "kvfold.json").read_text())
    assert [each["rope_dim"] for each in record["splits"]] == [2, 4, 6, 8, 10, 12, 14]
    best = min(record["splits"], key=lambda each: each["kl"])
    config = json.loads((split[0] / "config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (best["kv_rank"], best["rope_dim"])
    assert record["drift"]["kl"]["value"] == pytest.approx(best["kl"], rel=1e-6)
    stages = list(dict.fromkeys(stage for stage, *_ in split[1]))
    assert stages == ["survey", "splits", "write", "convert"]
    assert [step[1:] for step in split[1] if step[0] == "splits"] == [(done, 7) for done in range(8)]


@pytest.mark.slow
def test_a_sweep_chooses_the_same_split_of_a_budget(split):
    (row,) = sweep_checkpoint(demo_folder(), "mla:16", samples=8, seq_len=64, quiet=True).rows
    record = json.loads((split[0] / "kvfold.json").read_text())
    assert row.splits == record["splits"]
    assert row.kind == record["attention"]["to"]
    assert row.measured.kl == record["drift"]["kl"]["value"]


@pytest.mark.slow
def test_a_budget_is_judged_by_what_refinement_reaches(tmp_path, split, monkeypatch):
    monkeypatch.setattr(splits, "_TRIAL_STEPS", 4)
    plain = json.loads((split[0] / "kvfold.json").read_text())["splits"]
    refined = convert(tmp_path / "refined", **BUDGET, refine=4).record["splits"]
    assert [each["kl"] for each in refined] == [each["kl"] for each in plain]
    finals = [each for each in refined if "refined_kl" in each]
    assert finals == [each for each in refined if each in sorted(refined, key=lambda each: each["kl"])[:4]]
    assert all(each["refined_kl"] < each["kl"] for each in finals)
    config = json.loads((tmp_path / "refined" / "config.json").read_text())
    assert config["qk_rope_head_dim"] == min(finals, key=lambda each: each["refined_kl"])["rope_dim"]


def tried(rank, rope, kl, layout="free", dim=128):
    """A candidate of a llama with heads of ``dim`` dims."""
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 99, "head_dim": dim}
    model, target = model_of(config), LatentTarget(rank, rope, layout=layout)
    plan = Mock(**{"latent_target.return_value": target, "engines": verdicts(latent_result_of(model, target))})
    return splits.Candidate(plan, Mock(), kl)


@pytest.mark.parametrize(
    ("served", "best", "taken"),
    [(0.0104, 0.0100, (512, 64)), (0.0106, 0.0100, (448, 128)), (math.nan, math.nan, (448, 128))],
)
def test_a_split_that_more_engines_serve_is_taken_where_it_costs_at_most_5_percent(served, best, taken):
    candidates = [tried(448, 128, best), tried(384, 192, 0.02), tried(512, 64, served)]
    target = splits.preferred(candidates).target
    assert (target.kv_rank, target.rope_dim) == taken


@pytest.mark.parametrize(
    ("rank", "dim", "layout", "preferred"),
    [
        (448, 128, "free", True),
        (448, 64, "free", False),  # on GPUs vLLM's prefill takes no such heads, and on CPUs no such cache
        (256, 80, "free", False),
        (256, 192, "free", False),
        (512, 64, "free", True),  # on CPUs
        (448, 128, "engine", True),
        (448, 80, "engine", True),  # its heads are padded
        (400, 128, "engine", False),  # the other engines serve every split
    ],
)
def test_a_split_is_preferred_by_the_verdict_on_it(rank, dim, layout, preferred, monkeypatch):
    other, size = tried(rank - 64, 128, 0.01, layout, dim), tried(rank, 64, 0.0101, layout, dim)
    assert (splits.preferred([other, size]) is size) is preferred
    better = [tried(40 - rope, rope, 0.001 * rope, layout, dim) for rope in (2, 4, 6, 8)]
    for each in (*better, size):
        each.plan.request = Mock(refine=1, quiet=True)
        each.plan.geometry.layers = 2
    monkeypatch.setattr(
        splits, "trial", lambda each, surveyed, refine=False: replace(each, refined_kl=1.0) if refine else each
    )
    compared = splits.compare_splits([size, *better], Mock(), Stages(None, quiet=True))
    assert compared[0].refined is preferred


@pytest.fixture
def trial_walk(monkeypatch):
    """The class of the walks of trials, which find 6 layers to convert and a KL of 0.5."""
    steps = [Mock(index=index) for index in range(6)]
    walk = Mock(**{"return_value.steps.return_value": steps, "return_value.kl.return_value": 0.5})
    monkeypatch.setattr(splits, "StudentWalk", walk)
    monkeypatch.setattr(splits, "fitted_latent", lambda option, index, step, surveyed: Fitted(index))
    return walk


def option_of(layers):
    return splits.Candidate(Mock(**{"geometry.layers": layers}), Mock())


def surveyed_tokens(sequences, length):
    tokens = torch.zeros(sequences, length, dtype=torch.int64)
    return Mock(tokens=CalibrationTokens(tokens, tokens, "text", "digest"))


def test_trials_convert_a_few_layers_and_keep_the_others(trial_walk):
    splits.trial(option_of(6), surveyed_tokens(8, 8))
    steps = trial_walk.return_value.steps.return_value
    converted = [call.args[1] for call in trial_walk.return_value.convert.call_args_list]
    assert converted == [0, 2, 3, 5]
    assert [step.skip.called for step in steps] == [False, True, False, False, True, False]


@pytest.mark.parametrize("layers", [1, 2, 4, 5, 30, 80])
def test_the_layers_of_trials_are_spread_over_the_model(layers):
    found = sorted(splits.probed_layers(layers))
    assert len(found) == min(layers, 4)
    gaps = [after - before for before, after in pairwise([-found[0] - 1, *found, 2 * layers - 1 - found[-1]])]
    assert max(gaps) - min(gaps) <= 2


def test_a_refined_drift_comes_before_one_as_fitted():
    low, refined, lower = (Mock() for _ in range(3))
    made = [splits.Candidate(low, Mock(), 0.1), splits.Candidate(refined, Mock(), 0.5, 0.4)]
    made.append(splits.Candidate(lower, Mock(), 0.6, 0.3))
    assert [each.plan for each in sorted(made, key=lambda each: each.judged)] == [lower, refined, low]


@pytest.mark.slow
def test_layouts_are_compared_after_equally_many_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "_TRIAL_STEPS", 2)
    options = {"to": "mla", "kv_rank": 32, "rope_dim": 32, "layout": "engine", "samples": 8, "seq_len": 64}
    record = convert(tmp_path / "out", **options, refine=8).record
    found = record["free_layout"]
    assert found["steps"] == 2
    assert found["engine_kl"] != record["drift"]["kl"]["value"]  # which is that after eight
    shown = f"{found['engine_kl']:.4f} nats, layout free would by {found['kl']:.4f} (same split, same text after 2"
    assert shown in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_rank": 32, "rope_dim": 31}, "--rope-dim 31 must be even"),
        ({"kv_rank": 32, "rope_dim": 258}, "must be at most 256"),
        ({"kv_rank": 256, "rope_dim": 256}, "as many as the source's 512 or more"),
        ({"kv_rank": 32, "rope_dim": 0}, "must be an even number from 2"),
        (
            {"kv_rank": 32, "rope_dim": 64, "layout": "engine"},
            "at most 32: .* one pair per frequency",
        ),
        ({"kv_rank": 32, "rope_dim": 32, "q_rank": 1000}, "--q-rank 1000 must be from 2 to 257"),
    ],
)
def test_latent_sizes_that_cannot_be(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        convert(tmp_path / "out", to="mla", **options)
    assert not list(tmp_path.iterdir())


def test_families_that_no_latent_class_can_express(tmp_path, tiny_family):
    with pytest.raises(InputError, match=r"positions back, fewer than the context .* --layout kvfold works"):
        convert(tmp_path / "out", model=tiny_family("qwen3"), to="mla", kv_rank=8, rope_dim=8)
    with pytest.raises(InputError, match="LayerNorm"):
        convert(tmp_path / "out", model=tiny_family("stablelm"), to="mla", kv_rank=8, rope_dim=8)


@pytest.mark.slow
def test_engine_layout_has_no_attention_bias_and_plain_rope(tmp_path, held_out, latent):
    record = convert(tmp_path / "out", to="mla", kv_rank=32, rope_dim=32, layout="engine").record
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["attention_bias"] is False
    assert (config["rope_scaling"]["rope_type"], config["rope_scaling"]["factor"]) == ("yarn", 1)  # plain RoPE
    assert config["tie_word_embeddings"] is False
    stored = tensors(tmp_path / "out")
    assert not any(name.endswith("bias") for name in stored)
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert sum(record["rotary_slots_per_pair"]) == 16
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"layout free would by {record['free_layout']['kl']:.4f}" in card
    assert re.search(r"\| llama.cpp .* \| yes \| 64 \| with \"q_lora_rank\": 0", card)
    assert checkpoint_perplexity(tmp_path / "out", held_out) < 2 * checkpoint_perplexity(latent, held_out)
