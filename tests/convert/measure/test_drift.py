"""``kvfold drift``: its progress, its text on the terminal, and how figures are written."""

import math
from dataclasses import replace

import pytest
from helpers.checkpoints import convert, run_conversion

from kvfold.attention.drift.metrics import format_metrics
from kvfold.convert import DriftRequest, InputError, demo_folder, drift_checkpoints


def test_tokens_in_layers_and_logits_are_counted_and_what_is_not_finite_is_a_dash(reader):
    calls = []
    request = DriftRequest(reader, reader, samples=1, seq_len=16, quiet=True)
    report = drift_checkpoints(request, lambda *step: calls.append(step))
    stages, done, (total, *_) = zip(*calls, strict=True)
    assert set(stages) == {"compare"}
    assert len(set(done)) > 4
    assert (done[0], done[-1]) == (0, total)
    broken = replace(report, kl=math.nan, student_loss=math.inf, kl_margin=None)
    assert format_metrics(broken) == "excess - nats, KL - nats, top-1 100.0 %"
    assert broken.to_dict()["kl"]["value"] is None


def test_swapped_models_are_told(demo_latent, capsys):
    request = DriftRequest(demo_folder(), demo_latent, samples=1, seq_len=16, quiet=True)
    drift_checkpoints(request)
    assert capsys.readouterr().err == ""
    drift_checkpoints(replace(request, model=str(demo_latent), out=demo_folder()))
    assert "swapped" in capsys.readouterr().err


def test_models_that_do_not_match_are_told_in_any_family(tiny_family, refused):
    """GPT-2 has its own names for sizes."""
    models = [tiny_family("gpt2", vocab_size=2048, num_hidden_layers=layers) for layers in (2, 3)]
    with refused("num_hidden_layers must be 2"):
        drift_checkpoints(DriftRequest(*models, quiet=True))
    with refused(field="seq_len"):
        drift_checkpoints(DriftRequest(models[0], models[0], seq_len=100_000, quiet=True))


def test_the_cache_of_out_alone_is_rounded(reader):
    report = drift_checkpoints(
        DriftRequest(reader, reader, samples=1, seq_len=48, cache="int2", quiet=True)
    )
    assert report.kl > 0
    assert report.student_cache_bytes == report.source_cache_bytes * 3 // 32
    assert report.to_dict()["cache"]["rounding"] == "int2"


def test_a_conversion_trains_and_measures_with_the_cache_that_it_is_asked_for(reader, tmp_path):
    options = {"to": "mla", "kv_rank": 32, "rope_dim": 4, "samples": 8, "seq_len": 32}
    exact, rounded = (
        run_conversion(reader, tmp_path / name, polish=1, cache=cache, **options)
        for name, cache in (("exact", None), ("rounded", "int2"))
    )
    assert rounded.record["polish"]["before"] > 1.5 * exact.record["polish"]["before"]
    assert rounded.drift.kl > 1.5 * exact.drift.kl
    summary = " ".join(rounded.summary().split())
    assert "rounded to int2 (simulated)" in summary
    assert "--cache int2" in summary


def test_a_conversion_rounds_no_cache_that_has_no_such_groups(reader, tmp_path, told):
    for options in ({"kv_rank": 24, "rope_dim": 4}, {"budget": 24}):
        with pytest.raises(InputError, match="32 channels") as error:
            run_conversion(reader, tmp_path / "out", to="mla", cache="int4", **options)
        told(error.value)
    with pytest.raises(InputError, match="reads none") as error:
        run_conversion(reader, tmp_path / "out", to="mqa", method="mean", cache="int4")
    told(error.value)


def test_groups_that_do_not_divide_the_channels_are_one_line(reader, tmp_path, told):
    convert(reader, tmp_path / "out", to="mla", kv_rank=24, rope_dim=4, method="svd")
    with pytest.raises(InputError) as error:
        drift_checkpoints(DriftRequest(reader, tmp_path / "out", samples=1, cache="int4"))
    told(error.value)
