"""Losses on trained models, on text that was not calibrated on: bounds on the reference model and
on a real one.
"""

import math
from functools import cache

import pytest
from helpers.checkpoints import run_conversion
from transformers import AutoTokenizer

from kvfold.convert.data import read_text
from kvfold.convert.measure.losses import cut_token_windows, measure_perplexity

pytestmark = pytest.mark.slow
# What the toys lack is an attention sink, massive activations and thirty layers.
HALF = {"to": "mla", "kv_rank": 128, "rope_dim": 64}
THIRD = {"to": "mla", "kv_rank": 64, "rope_dim": 64}


def excess_of(model, text, place, sequences, **common):
    """``excess(to="mqa")``: natural logarithm of perplexity after over before."""
    tokens = cut_token_windows(AutoTokenizer.from_pretrained(model), text, sequences, 256)
    before = measure_perplexity(model, tokens)

    @cache
    def excess(**options):
        out = place / "-".join(map(str, options.values()))
        run_conversion(model, out, **common, **options)
        return math.log(measure_perplexity(out, tokens) / before)

    return excess


@pytest.fixture(scope="module")
def reference_excess(reference, tmp_path_factory):
    text, calibration = (reference / f"{name}.txt" for name in ("evaluation", "calibration"))
    common = {"calibration": calibration, "samples": 16, "seq_len": 128, "positions": False}
    place = tmp_path_factory.mktemp("reference")
    return excess_of(reference / "llama-mha", text.read_text(encoding="utf-8"), place, 16, **common)


@pytest.mark.parametrize(("kv_heads", "limit"), [(2, 0.04), (1, 0.10)])
def test_principal_loses_little(reference_excess, kv_heads, limit):
    """Mean pooling loses 2.07 and 2.82 nats on this model."""
    assert 0 < reference_excess(to="gqa", kv_heads=kv_heads, group="similar") < limit


@pytest.fixture(scope="module")
def real_excess(real, tmp_path_factory):
    """On code that ships with kvfold."""
    return excess_of(
        real, read_text("held_out"), tmp_path_factory.mktemp("real"), 8, samples=16, seq_len=256
    )


def test_half_of_the_cache_costs_little(real_excess):
    assert real_excess(**HALF) < 0.3
    assert real_excess(**HALF, layout="engine") < 1.5 * real_excess(**HALF) + 0.02


def test_latent_attention_loses_no_more_than_a_fold_of_its_size(real_excess):
    assert real_excess(**THIRD) <= real_excess(to="mqa")
