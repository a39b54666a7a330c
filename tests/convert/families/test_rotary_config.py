"""Rotary frequencies against transformers, in the spelling of transformers 5 and the older one."""

import copy

import pytest
import tiny_models
import torch
from helpers.cases import read_cases
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvfold.convert.families.layer_io import make_layer_rotary
from kvfold.convert.families.model import make_model

SIZES = tiny_models.SIZES | {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"max_position_embeddings": 4096}
FREQUENCIES = {"rtol": 2e-6, "atol": 0.0}  # transformers computes them in float32
CASES = read_cases(__file__)


def old_spelling(config):
    """The config with rope as before transformers 5: rope_theta beside rope_scaling."""
    table = dict(config["rope_parameters"])
    rest = {key: value for key, value in config.items() if key != "rope_parameters"}
    old = {"rope_theta": table.pop("rope_theta")}
    if "partial_rotary_factor" in table:
        old["partial_rotary_factor"] = table.pop("partial_rotary_factor")
    kind = table.pop("rope_type")
    return rest | old | {"rope_scaling": None if kind == "default" else {"type": kind, **table}}


def stock_config(config):
    """Its class changes what it is given."""
    return AutoConfig.for_model(**copy.deepcopy(config))


def check(config, kind, context="short", length=None):
    stock = stock_config(config)
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[kind](stock, None, seq_len=length)
    model = make_model(config)
    theta, factor = model.compute_frequencies(0, context)
    torch.testing.assert_close(
        torch.tensor(theta, dtype=torch.float64), frequencies.double(), **FREQUENCIES
    )
    assert factor == pytest.approx(amplitude, rel=1e-12)
    assert model.geometry.rotary_dims == 2 * len(theta)


@pytest.mark.parametrize(("name", "rope", "others"), CASES["scaled"])
def test_scaled_types_in_both_spellings(name, rope, others):
    config = {"model_type": name, **SIZES, "rope_parameters": {"rope_theta": 5e4, **rope}, **others}
    for spelling in (config, old_spelling(config)):
        check(spelling, rope["rope_type"])


@pytest.mark.parametrize(("kind", "original"), CASES["phi3_lengths"])
def test_phi3_has_one_scaled_type_under_three_names_and_its_own_original_length(kind, original):
    config = {"model_type": "phi3", **SIZES, "pad_token_id": 0, "partial_rotary_factor": 0.75}
    config |= {"max_position_embeddings": 131072, **original}
    config["rope_scaling"] = {"type": kind, **CASES["phi3"], **original}
    check(config, "longrope")


def test_longrope_has_two_sets():
    config = {"model_type": "llama", **SIZES, "rope_parameters": CASES["two_sets"]}
    check(config, "longrope", "short", 1024)
    check(config, "longrope", "long", 1025)


def test_gemma3_scales_its_global_layers_alone():
    old = {"rope_theta": 2e6, "rope_local_base_freq": 5000.0}
    old["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    sizes = {"model_type": "gemma3_text", **SIZES, "num_hidden_layers": 6, "head_dim": 64}
    stock = stock_config({**sizes, **old})
    exponents = -torch.arange(0, 64, 2, dtype=torch.float64) / 64
    for spelling in (old, {"rope_parameters": stock.rope_parameters}):
        model = make_model({**sizes, **spelling})
        torch.testing.assert_close(make_layer_rotary(model, 0).theta, 5000.0**exponents)
        torch.testing.assert_close(make_layer_rotary(model, 5).theta, 2e6**exponents / 8)


@pytest.mark.parametrize("rope", CASES["wrong"])
def test_wrong_parameters_are_errors(rope, refused):
    with refused():
        make_layer_rotary(make_model({"model_type": "llama", **SIZES, **rope}), 0)
