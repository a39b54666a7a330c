"""The terminal table of a drift report: every number, each beside its floor, in a hundred columns."""

import math
from dataclasses import replace

import pytest

from kvfold.attention.drift.report import DriftReport, Floor, HeadDrift, LayerDrift, Measurement
from kvfold.convert.measure.drift import drift_table

HEADS = (HeadDrift(0, 1, 0.01, 0.002), HeadDrift(1, 0, 0.4, 0.03))
LAYERS = (
    LayerDrift(0, 0.25, 0.25, 0.0123, 0.0456, 0.0161, HEADS),
    LayerDrift(1, 0.125, 0.5, 2e-5, 0.75, None, ()),
)
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
)


def test_the_whole_table():
    assert drift_table(REPORT).splitlines() == [
        "drift over 8 sequences of 512 tokens, float32 on cpu",
        "floor: the source in float32 against itself in float64, over 8 sequences",
        "",
        "                                           source    converted        drift        floor",
        "perplexity                                 46.125       51.310    +11.241 %   +1.0e-06 %",
        "loss, nats per token                       3.8314       3.9379      +0.1065      1.0e-08",
        "KL of next-token distributions, nats                                 0.1234      2.0e-13",
        "top-1 agreement                                                      87.50%      100.00%",
        "cache, bytes per token                      12288         6144        x 0.5        exact",
        "95 % interval of the perplexity's drift, by sequence: +9.0385 % to +13.488 %",
        "",
        "layer     attention,     attention,      residual,      residual,      attention    worst head",
        "               local     propagated          local     propagated       rows, KL    and its error",
        "    0  0.2500  1e-07  0.2500  2e-07  0.0123  3e-07  0.0456  4e-07  0.0161  5e-14      1  0.4000",
        "    1  0.1250  1e-07  0.5000  2e-07 2.0e-05  3e-07  0.7500  4e-07       -  5e-14",
        "",
        "attention, residual: distance of the attention's output, and of the residual stream after the",
        "  layer, from the source's, as a share of its size; local: given the source's inputs;",
        "  propagated: given the converted model's own",
        "attention rows, KL: between attention weights in nats, mean over heads and positions",
        "worst head: whose part of the attention's output differs most, and its relative error",
        "second numbers: the floor, what rounding alone gives; -: not to be compared",
    ]


def test_models_and_text_are_named_with_the_beginnings_of_their_hashes():
    about = {"source": {"name": "m", "sha256": "ab" * 32}, "text": {"name": "t", "sha256": "cd" * 32, "seed": 3}}
    lines = drift_table(replace(REPORT, about=about)).splitlines()
    assert lines[2:4] == ["source: m (sha256 abababababab)", "text: t (sha256 cdcdcdcdcdcd, seed 3)"]


def test_lines_fit_in_a_hundred_columns_whatever_the_numbers():
    wild = LayerDrift(127, math.inf, 123456.789, math.nan, 1e-30, 99999.5, (HeadDrift(127, 3, math.inf, None),))
    measured = replace(REPORT.measured, layers=(wild,), kl=math.nan, student_loss=1e4)
    floor = replace(REPORT.floor, measured=replace(REPORT.floor.measured, layers=LOW[:1]))
    table = drift_table(replace(REPORT, measured=measured, floor=floor, student_cache_bytes=123456789))
    assert max(map(len, table.splitlines())) <= 100
    assert "nan" in table
    assert "inf" in table


def test_a_missing_floor_is_said():
    lines = drift_table(replace(REPORT, floor=None)).splitlines()
    assert lines[1] == "floor: not measured"
    assert lines[-9].split() == [
        "0",
        "0.2500",
        "-",
        "0.2500",
        "-",
        "0.0123",
        "-",
        "0.0456",
        "-",
        "0.0161",
        "-",
        "1",
        "0.4000",
    ]


def test_identical_models_are_called_so():
    heads = (HeadDrift(0, 0, 0.0, 0.0),)
    same = tuple(LayerDrift(index, 0.0, 0.0, 0.0, 0.0, 0.0, heads) for index in range(2))
    measured = Measurement(4088, 0.0, 1.0, 3.8, 3.8, same)
    lines = drift_table(replace(REPORT, measured=measured)).splitlines()
    assert lines[2] == "the two are identical: every drift is exactly 0"
    assert lines[-8] == "    1       0  1e-07       0  2e-07       0  3e-07       0  4e-07       0  5e-14   none"


@pytest.mark.parametrize(("sequences", "expected"), [(1, "1 sequence of"), (2, "2 sequences of")])
def test_different_dtypes_are_said(sequences, expected):
    first = drift_table(replace(REPORT, student_dtype="bfloat16", sequences=sequences)).splitlines()[0]
    assert first == f"drift over {expected} 512 tokens, float32 (converted: bfloat16) on cpu"
