"""Conversions that read text, end to end on small trained and random models."""

import json
import math
import re
from unittest.mock import Mock

import pytest
import torch
from helpers.checkpoints import stock_model, tensors
from transformers import AutoTokenizer

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.conversion import latent as latent_run
from kvfold.convert.conversion.record import preference_text
from kvfold.convert.data import demo_folder, read_text
from kvfold.convert.errors import InputError
from kvfold.convert.measure.perplexity import checkpoint_perplexity, token_windows
from kvfold.convert.targets.mla.config import LatentTarget

QUICK = {"samples": 16, "seq_len": 128, "quiet": True}


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


def test_equal_requests_give_equal_bytes(tmp_path, folded):
    convert(tmp_path / "again", to="gqa", kv_heads=2, group="contiguous")
    for file in folded.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_text_of_ones_own(tmp_path):
    text = tmp_path / "own.txt"
    text.write_text(read_text("train")[:200_000])
    record = convert(tmp_path / "out", to="mqa", calibration=str(text)).record
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


@pytest.mark.slow
def test_a_budget_takes_the_split_that_drifts_least(tmp_path):
    record = convert(tmp_path / "out", to="mla", budget=32, samples=8, seq_len=64).record
    splits = record["splits"]
    assert [split["rope_dim"] for split in splits] == [4, 8, 12, 16, 20, 24, 28]
    best = min(splits, key=lambda split: split["kl"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (best["kv_rank"], best["rope_dim"])
    assert record["drift"]["kl"]["value"] == pytest.approx(best["kl"], rel=1e-6)


@pytest.mark.slow
def test_a_budget_is_judged_by_what_refinement_reaches(tmp_path, monkeypatch):
    monkeypatch.setattr(latent_run, "_TRIAL_STEPS", 4)
    options = {"to": "mla", "budget": 16, "samples": 8, "seq_len": 64}
    plain = convert(tmp_path / "plain", **options).record["splits"]
    refined = convert(tmp_path / "refined", **options, refine=4).record["splits"]
    assert [split["rope_dim"] for split in refined] == [split["rope_dim"] for split in plain]
    assert all(after["kl"] < before["kl"] for before, after in zip(plain, refined, strict=True))


def tried(rank, rope, kl):
    plan = Mock(**{"latent_target.return_value": LatentTarget(rank, rope)})
    return latent_run.Candidate(plan, Mock(), kl)


@pytest.mark.parametrize(
    ("served", "best", "taken"),
    [(0.0104, 0.0100, (512, 64)), (0.0106, 0.0100, (448, 128)), (math.nan, math.nan, (448, 128))],
)
def test_a_split_with_kernels_is_taken_where_it_costs_at_most_5_percent(served, best, taken):
    candidates = [tried(448, 128, best), tried(384, 192, 0.02), tried(512, 64, served)]
    target = latent_run.preferred(candidates).target
    assert (target.kv_rank, target.rope_dim) == taken


def test_a_preferred_split_is_told():
    record = {"preferred_for_kernels": {"kl": 0.0104, "instead_of": {"kv_rank": 448, "rope_dim": 128, "kl": 0.01}}}
    assert preference_text(record).endswith("a KL of 0.0104 nats on held-out text; the best, 448+128, has 0.0100")
    assert preference_text({}) == ""


def test_trials_refine_each_layer_for_20_steps(monkeypatch):
    walk = Mock(**{"return_value.steps.return_value": [], "return_value.kl.return_value": 0.5})
    monkeypatch.setattr(latent_run, "StudentWalk", walk)
    assert latent_run.trial(latent_run.Candidate(Mock(), Mock()), Mock()).kl == 0.5
    assert walk.call_args.kwargs["trial_steps"] == 20


@pytest.mark.slow
def test_layouts_are_compared_after_equally_many_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(latent_run, "_TRIAL_STEPS", 2)
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
        ({"kv_rank": 32, "rope_dim": 31}, "rotary dims come in pairs; expected an even number"),
        ({"kv_rank": 32, "rope_dim": 258}, "expected at most 256"),
        ({"kv_rank": 256, "rope_dim": 256}, "the source has 512; expected fewer"),
        ({"kv_rank": 32, "rope_dim": 0}, "need 2 at least"),
        ({"kv_rank": 32, "rope_dim": 64, "layout": "engine"}, "one pair per frequency; expected at most 32"),
        ({"kv_rank": 32, "rope_dim": 32, "q_rank": 1000}, "--q-rank 1000: expected 2 to 257"),
    ],
)
def test_latent_sizes_that_cannot_be(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        convert(tmp_path / "out", to="mla", **options)
    assert not list(tmp_path.iterdir())


def test_families_that_no_latent_class_can_express(tmp_path, tiny_family):
    with pytest.raises(InputError, match=r"normalizes queries and keys .* --to gqa works"):
        convert(tmp_path / "out", model=tiny_family("qwen3"), to="mla", kv_rank=8, rope_dim=8)
    with pytest.raises(InputError, match="LayerNorm"):
        convert(tmp_path / "out", model=tiny_family("stablelm"), to="mla", kv_rank=8, rope_dim=8)


@pytest.mark.slow
def test_engine_layout_has_no_attention_bias_and_plain_rope(tmp_path, held_out, latent):
    record = convert(tmp_path / "out", to="mla", kv_rank=32, rope_dim=32, layout="engine").record
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["attention_bias"] is False
    assert config["rope_scaling"] is None
    assert config["tie_word_embeddings"] is False
    stored = tensors(tmp_path / "out")
    assert not any(name.endswith("bias") for name in stored)
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert sum(record["rotary_slots_per_pair"]) == 16
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"layout free would by {record['free_layout']['kl']:.4f}" in card
    assert re.search(r"\| llama.cpp .* \| yes \| 64 \| with \"q_lora_rank\": 0", card)
    assert checkpoint_perplexity(tmp_path / "out", held_out) < 2 * checkpoint_perplexity(latent, held_out)


@pytest.mark.slow
def test_progress_of_a_survey_and_of_the_splits_of_a_budget(tmp_path):
    steps = []
    request = ConvertRequest(
        model=str(demo_folder()), out=str(tmp_path / "out"), to="mla", budget=8, samples=8, seq_len=32, quiet=True
    )
    convert_checkpoint(request, progress=lambda *step: steps.append(step))
    stages = {stage: [step[1:] for step in steps if step[0] == stage] for stage in dict.fromkeys(s[0] for s in steps)}
    assert list(stages) == ["survey", "splits", "write", "convert"]
    assert stages["survey"] == [(layers, 4) for layers in range(5)]
    assert stages["splits"] == [(splits, 3) for splits in range(4)]
    assert stages["convert"] == [(layers, 4) for layers in range(5)]
