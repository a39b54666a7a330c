"""``kvfold drift``: its progress, its text on the terminal, and how figures are written."""

import math
from dataclasses import replace

import pytest
from helpers.checkpoints import convert, run_conversion

from kvfold.attention.drift.compare import DriftMeasurement, LayerDrift, PositionRangeDrift
from kvfold.attention.drift.metrics import format_metrics, make_position_rows, metrics_to_dict
from kvfold.attention.drift.report import DriftReport
from kvfold.convert import DriftRequest, InputError, demo_folder, drift_checkpoints
from kvfold.convert.commands.drift_command import summarize_drift

LAYERS = (
    LayerDrift(0.25, 0.25, 0.0123, 0.0456),
    LayerDrift(0.125, 0.5, 2e-5, 0.75),
)
LOW = LayerDrift(1e-7, 2e-7, 3e-7, 4e-7)
REPORT = DriftReport(
    sequences=8,
    length=512,
    device="cpu",
    source_dtype="float32",
    student_dtype="float32",
    source_cache_bytes=12288,
    student_cache_bytes=6144,
    kl=0.1234,
    agreement=0.875,
    teacher_loss=math.log(46.125),
    student_loss=math.log(51.31),
    kl_margin=0.01,
    excess_margin=0.02,
    layers=LAYERS,
    floor=DriftMeasurement(
        kl=2e-13, agreement=1.0, teacher_loss=3.8, student_loss=3.8 + 1e-8, layers=(LOW, LOW)
    ),
    about={
        "source": {"name": "m", "sha256": "ab" * 32},
        "converted": {"name": "c", "sha256": "ef" * 32},
        "text": {"name": "t", "sha256": "cd" * 32, "seed": 3},
    },
)
REQUEST = DriftRequest("m", "c")


def test_the_text_is_a_short_block(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = summarize_drift(REQUEST, REPORT).splitlines()
    labels = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert labels == ["drift", "text", "cache", "loss", "rounding", "verdict", "next"]
    assert lines[3].endswith("excess +0.1065 ± 0.0200 nats, KL 0.1234 nats, top-1 87.5 %")
    assert lines[4].endswith("KL 2e-13 nats")
    assert "rounding" not in summarize_drift(REQUEST, replace(REPORT, floor=None))


def test_all_layers_stand_with_the_rounding_floor(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = summarize_drift(REQUEST, REPORT, layers=True)
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "0.25", "0.25", "0.0123", "0.0456"] in rows
    assert ["1", "0.125", "0.5", "2e-05", "0.75"] in rows
    assert ["rounding", "1e-07", "2e-07", "3e-07", "4e-07"] in rows
    rows = {row[0]: row[1:] for row in REPORT.format_rows()}
    assert rows["perplexity"] == ("46.125", "51.310", "")
    assert rows["top-1 agreement"] == ("", "87.5 %", "100.0 %")


def test_what_is_not_finite_is_a_dash():
    broken = replace(REPORT, kl=math.nan, student_loss=math.inf, kl_margin=None)
    assert format_metrics(broken) == "excess - nats, KL - nats, top-1 87.5 %"
    assert metrics_to_dict(broken, None)["kl"] == {"value": None, "floor": None, "margin": None}
    assert (
        format_metrics(replace(broken, kl=-1e-9)) == "excess - nats, KL 0.0000 nats, top-1 87.5 %"
    )


def test_figures_by_position_are_rows_where_there_are_several():
    stretches = (
        PositionRangeDrift(1, 64, 0.1, 0.02, 0.2, None, 8),
        PositionRangeDrift(64, 128, 0.1, 0.02, 0.3, 0.1, 8),
    )
    _, first, second = make_position_rows(replace(REPORT, stretches=stretches))
    assert first == ("1-64", "+0.1000 ± 0.0200", "0.2000")
    assert second == ("64-128", "+0.1000 ± 0.0200", "0.3000 ± 0.1000")
    assert make_position_rows(replace(REPORT, stretches=stretches[:1])) == []


def test_tokens_in_layers_and_logits_are_counted():
    calls = []
    request = DriftRequest(demo_folder(), demo_folder(), samples=1, seq_len=16, quiet=True)
    drift_checkpoints(request, lambda *step: calls.append(step))
    stages, done, (total, *_) = zip(*calls, strict=True)
    assert set(stages) == {"compare"}
    assert len(set(done)) > 8
    assert (done[0], done[-1]) == (0, total)


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
