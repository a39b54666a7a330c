"""Results on a real language model: what the toys lack is an attention sink, massive activations and thirty layers."""

import math
from functools import cache

import pytest
from transformers import AutoTokenizer

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import read_text
from kvfold.convert.measure.losses import checkpoint_perplexity, token_windows

pytestmark = pytest.mark.slow

HALF = {"to": "mla", "kv_rank": 128, "rope_dim": 64}
THIRD = {"to": "mla", "kv_rank": 64, "rope_dim": 64}


@pytest.fixture(scope="module")
def excess(real, tmp_path_factory):
    """``excess(to="mqa")``: natural logarithm of perplexity after over before, on code that ships with kvfold."""
    tokens = token_windows(AutoTokenizer.from_pretrained(real), read_text("held_out"), 8, 256)
    place = tmp_path_factory.mktemp("real")
    before = checkpoint_perplexity(real, tokens)

    @cache
    def measured(**options):
        out = place / "-".join(map(str, options.values()))
        convert_checkpoint(
            ConvertRequest(model=str(real), out=str(out), samples=16, seq_len=256, quiet=True, **options)
        )
        return math.log(checkpoint_perplexity(out, tokens) / before)

    return measured


def test_half_of_the_cache_costs_little(excess):
    assert excess(**HALF) < 0.3


def test_latent_attention_loses_no_more_than_a_fold_of_its_size(excess):
    assert excess(**THIRD) <= excess(to="mqa")


def test_the_live_norm_of_layout_engine_costs_little(excess):
    assert excess(**HALF, layout="engine") < 1.5 * excess(**HALF) + 0.02
