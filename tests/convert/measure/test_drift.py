"""``kvfold drift``: its progress, and its table, in which every number stands with its rounding floor."""

import math
from dataclasses import replace

from kvfold.attention.drift.report import DriftReport, Floor, HeadDrift, LayerDrift, Measurement
from kvfold.convert import demo_folder, drift_checkpoints
from kvfold.convert.measure.drift import drift_table

HEADS = (HeadDrift(0, 1, 0.01, 0.002), HeadDrift(1, 0, 0.4, 0.03))
LAYERS = (LayerDrift(0, 0.25, 0.25, 0.0123, 0.0456, 0.0161, HEADS), LayerDrift(1, 0.125, 0.5, 2e-5, 0.75, None, ()))
LOW = tuple(LayerDrift(index, 1e-7, 2e-7, 3e-7, 4e-7, 5e-14, ()) for index in range(2))
REPORT = DriftReport(
    sequences=8,
    length=512,
    device="cpu",
    source_dtype="float32",
    student_dtype="float32",
    source_cache_bytes=12288,
    student_cache_bytes=6144,
    measured=Measurement(4088, 0.1234, 0.875, math.log(46.125), math.log(51.31), LAYERS, 0.01, 0.02),
    floor=Floor("float32", "float64", 8, Measurement(4088, 2e-13, 1.0, 3.8, 3.8 + 1e-8, LOW)),
    about={"source": {"name": "m", "sha256": "ab" * 32}, "text": {"name": "t", "sha256": "cd" * 32, "seed": 3}},
)


def rows(report):
    return [" ".join(line.split()) for line in drift_table(report).splitlines()]


def test_every_number_stands_with_its_floor():
    found = rows(REPORT)
    assert found[:4] == [
        "drift over 8 sequences of 512 tokens, float32 on cpu",
        "floor: the source in float32 against itself in float64, over 8 sequences",
        "source: m (sha256 abababababab)",
        "text: t (sha256 cdcdcdcdcdcd, seed 3)",
    ]
    assert "perplexity 46.125 51.310 +11.241 % +1.0e-06 %" in found
    assert "loss, nats per token 3.8314 3.9379 +0.1065 1.0e-08" in found
    assert "KL of next-token distributions, nats 0.1234 2.0e-13" in found
    assert "cache, bytes per token 12288 6144 x 0.5 exact" in found
    assert "95 % interval of the drift in perplexity, over sequences: +9.0385 % to +13.488 %" in found
    assert "0 0.2500 1e-07 0.2500 2e-07 0.0123 3e-07 0.0456 4e-07 0.0161 5e-14 1 0.4000" in found
    assert "1 0.1250 1e-07 0.5000 2e-07 2.0e-05 3e-07 0.7500 4e-07 - 5e-14" in found


def test_the_table_says_what_is_missing_identical_or_different():
    without = rows(replace(REPORT, floor=None))
    assert without[1] == "floor: not measured"
    assert "0 0.2500 - 0.2500 - 0.0123 - 0.0456 - 0.0161 - 1 0.4000" in without
    same = tuple(LayerDrift(index, 0.0, 0.0, 0.0, 0.0, 0.0, (HeadDrift(0, 0, 0.0, 0.0),)) for index in range(2))
    identical = rows(replace(REPORT, measured=Measurement(4088, 0.0, 1.0, 3.8, 3.8, same)))
    assert "the two are identical: every drift is exactly 0" in identical
    assert "1 0 1e-07 0 2e-07 0 3e-07 0 4e-07 0 5e-14 none" in identical
    first = rows(replace(REPORT, student_dtype="bfloat16", sequences=1))[0]
    assert first == "drift over 1 sequence of 512 tokens, float32 (converted: bfloat16) on cpu"


def test_layers_and_then_rounding_are_counted():
    calls = []
    options = {"samples": 1, "seq_len": 16, "quiet": True, "progress": lambda *at: calls.append(at)}
    drift_checkpoints(demo_folder(), demo_folder(), **options)
    assert calls == [(stage, done, 4) for stage in ("compare", "floor") for done in range(5)]
