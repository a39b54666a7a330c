"""``kvfold drift``: its progress, and its table, in which every number stands with its rounding
floor.
"""

import math
import shutil
from dataclasses import replace

import pytest
from helpers.checkpoints import add_demo_tokenizer

from kvfold.attention.drift.report import DriftReport, Floor, HeadDrift, LayerDrift, Measurement
from kvfold.convert import DriftRequest, demo_folder, drift_checkpoints
from kvfold.convert.errors import InputError
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
    measured=Measurement(
        4088, 0.1234, 0.875, math.log(46.125), math.log(51.31), LAYERS, 0.01, 0.02
    ),
    floor=Floor("float32", "float64", 8, Measurement(4088, 2e-13, 1.0, 3.8, 3.8 + 1e-8, LOW)),
    about={
        "source": {"name": "m", "sha256": "ab" * 32},
        "text": {"name": "t", "sha256": "cd" * 32, "seed": 3},
    },
)


def test_every_number_stands_with_its_floor(told):
    """Or the table says that there is none, that the models are identical, or that they have two
    dtypes.
    """
    same = tuple(
        LayerDrift(index, 0.0, 0.0, 0.0, 0.0, 0.0, (HeadDrift(0, 0, 0.0, 0.0),))
        for index in range(2)
    )
    identical = {"measured": Measurement(4088, 0.0, 1.0, 3.8, 3.8, same)}
    seen: set[str] = set()
    for changes in ({}, {"floor": None}, identical, {"student_dtype": "bfloat16", "sequences": 1}):
        table, _ = drift_table(replace(REPORT, **changes), layers=True).split(
            "\n\nattention, residual"
        )
        told("\n".join(line for line in table.splitlines() if line not in {"", *seen}))
        seen |= {*table.splitlines()}


def test_a_summary_is_short_and_has_the_worst_layers_first():
    layers = tuple(
        replace(LAYERS[0], layer=index, residual_local=index % 5 / 9) for index in range(30)
    )
    measured = replace(REPORT.measured, layers=layers)
    lines = drift_table(replace(REPORT, measured=measured, floor=None)).splitlines()
    assert lines.index("") <= 10
    assert lines[lines.index("") + 2].startswith("from 0")
    assert [int(line.split()[0]) for line in lines[lines.index("") + 3 : -1]] == [4, 9, 14]
    assert lines[-1].startswith(
        "sorted by the local error of the residual: 3 of 30 layers; after each error, its"
    )
    few = drift_table(
        replace(REPORT, measured=replace(measured, layers=layers[:8]), floor=None)
    ).splitlines()
    assert [int(line.split()[0]) for line in few[few.index("") + 3 : -1]] == [
        4,
        3,
        2,
        7,
        1,
        6,
        0,
        5,
    ]
    assert (REPORT.kl, REPORT.excess) == (0.1234, REPORT.measured.excess)
    assert REPORT.perplexity == pytest.approx(51.31)


def test_layers_and_then_rounding_are_counted():
    calls = []
    options = {"samples": 1, "seq_len": 16, "quiet": True, "progress": lambda *at: calls.append(at)}
    drift_checkpoints(DriftRequest(demo_folder(), demo_folder(), **options))
    assert calls == [(stage, done, 4) for stage in ("compare", "floor") for done in range(5)]


def test_models_that_do_not_match_are_told_in_any_family(tiny_family, tmp_path):
    """GPT-2 has its own names for sizes."""
    models = [
        shutil.copytree(
            tiny_family("gpt2", vocab_size=2048, num_hidden_layers=layers),
            tmp_path / f"gpt2-{layers}",
        )
        for layers in (2, 3)
    ]
    for model in models:
        add_demo_tokenizer(model)
    with pytest.raises(InputError, match=r"num_hidden_layers must be 2 as in .*gpt2-2, not 3"):
        drift_checkpoints(DriftRequest(*models, samples=1, seq_len=16, quiet=True))
    with pytest.raises(
        InputError,
        match=r"--seq-len 100000 exceeds the [0-9]+ positions supported by the model gpt2-2",
    ):
        drift_checkpoints(
            DriftRequest(models[0], models[0], samples=1, seq_len=100_000, quiet=True)
        )


def test_a_conversion_in_place_of_its_source_is_told(demo_latent, capsys):
    for models in (
        (demo_latent, demo_folder()),
        (demo_folder(), demo_latent),
        (demo_latent, demo_latent),
    ):
        drift_checkpoints(DriftRequest(*models, samples=1, seq_len=16, quiet=True))
    swapped = f"{demo_latent} has a kvfold.json, as conversions have, and {demo_folder()} has none"
    assert (
        capsys.readouterr().err
        == f"warning: {swapped}; the source comes first, then its conversion\n"
    )
