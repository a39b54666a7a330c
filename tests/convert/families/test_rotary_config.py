"""Rotary frequencies against transformers, in the spelling of transformers 5 and the older one."""

import json

import pytest
import tiny_models
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvfold.convert.families.layer_io import make_layer_rotary
from kvfold.convert.families.model import make_model

SIZES = tiny_models.SIZES | {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"max_position_embeddings": 4096}
FREQUENCIES = {"rtol": 2e-6, "atol": 0.0}  # transformers computes them in float32
SCALED = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "longrope": {
        "short_factor": [1.0 + i / 8 for i in range(32)],
        "long_factor": [1.0 + i / 8 for i in range(32)],
        "original_max_position_embeddings": 1024,
    },
}
YARNS = [
    {"beta_fast": 16, "beta_slow": 2},
    {"attention_factor": 1.25},
    {"mscale": 0.7, "mscale_all_dim": 0.4},
    {"truncate": False},
]


def old_spelling(config: dict) -> dict:
    """The config with rope as before transformers 5: rope_theta beside rope_scaling."""
    table = dict(config["rope_parameters"])
    rest = {key: value for key, value in config.items() if key != "rope_parameters"}
    old = {"rope_theta": table.pop("rope_theta")}
    if "partial_rotary_factor" in table:
        old["partial_rotary_factor"] = table.pop("partial_rotary_factor")
    kind = table.pop("rope_type")
    return rest | old | {"rope_scaling": None if kind == "default" else {"type": kind, **table}}


def check(config: dict, frequencies: torch.Tensor, amplitude: float) -> None:
    rotary = make_layer_rotary(make_model(config), 0)
    torch.testing.assert_close(rotary.theta, frequencies.double(), **FREQUENCIES)
    assert rotary.amplitude == pytest.approx(amplitude, rel=1e-12)
    assert make_model(config).geometry.rotary_dims == rotary.dims


HALF = {"partial_rotary_factor": 0.5}
PHI3 = {
    "short_factor": [1.0 + i / 4 for i in range(24)],
    "long_factor": [1.0 + i / 4 for i in range(24)],
}
CASES = [
    *(("llama", kind, table, {}) for kind, table in SCALED.items()),
    *(("qwen2", "yarn", {**SCALED["yarn"], **extra}, {}) for extra in YARNS),
    *(
        (name, kind, SCALED[kind], HALF)
        for name, kind in (("phi", "linear"), ("stablelm", "yarn"), ("nemotron", "llama3"))
    ),
]


@pytest.mark.parametrize(("name", "kind", "table", "others"), CASES)
def test_scaled_types_in_both_spellings(name, kind, table, others):
    rope = {"rope_type": kind, "rope_theta": 50000.0, **table}
    config = {"model_type": name, **SIZES, "rope_parameters": rope, **others}
    for spelling in (config, old_spelling(config)):
        stock = AutoConfig.for_model(**json.loads(json.dumps(spelling)))
        check(spelling, *ROPE_INIT_FUNCTIONS[kind](stock, None))


SHORTER = {"original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("kind", "original"),
    [("longrope", {}), ("longrope", SHORTER), ("su", SHORTER), ("yarn", SHORTER)],
)
def test_phi3_has_one_scaled_type_under_three_names_and_its_own_original_length(kind, original):
    config = {"model_type": "phi3", **SIZES, "pad_token_id": 0, "partial_rotary_factor": 0.75}
    config |= {"max_position_embeddings": 131072, **original}
    config["rope_scaling"] = {"type": kind, **PHI3, **original}
    stock = AutoConfig.for_model(**json.loads(json.dumps(config)))
    check(config, *ROPE_INIT_FUNCTIONS["longrope"](stock, None))


def test_longrope_with_two_sets_needs_a_choice(refused):
    table = {"rope_type": "longrope", "rope_theta": 1e4, **SCALED["longrope"]}
    table["long_factor"] = [3.0] * 32
    config = {"model_type": "llama", **SIZES, "rope_parameters": table}
    model = make_model(config)
    with refused():
        make_layer_rotary(model, 0)
    stock = AutoConfig.for_model(**json.loads(json.dumps(config)))
    for context, length in (("short", 1024), ("long", 1025)):
        frequencies, amplitude = ROPE_INIT_FUNCTIONS["longrope"](stock, None, seq_len=length)
        rotary = make_layer_rotary(model, 0, context)
        torch.testing.assert_close(rotary.theta, frequencies.double(), **FREQUENCIES)
        assert rotary.amplitude == pytest.approx(amplitude)


def test_gemma3_scales_its_global_layers_alone():
    old = {"rope_theta": 2e6, "rope_local_base_freq": 5000.0}
    old["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    sizes = {"model_type": "gemma3_text", **SIZES, "num_hidden_layers": 6, "head_dim": 64}
    stock = AutoConfig.for_model(**json.loads(json.dumps({**sizes, **old})))
    exponents = -torch.arange(0, 64, 2, dtype=torch.float64) / 64
    for spelling in (old, {"rope_parameters": stock.rope_parameters}):
        model = make_model({**sizes, **spelling})
        torch.testing.assert_close(make_layer_rotary(model, 0).theta, 5000.0**exponents)
        torch.testing.assert_close(make_layer_rotary(model, 5).theta, 2e6**exponents / 8)


LLAMA3 = {"type": "llama3", **SCALED["llama3"], "high_freq_factor": 1.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "linear"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": "linear"},
        {"rope_scaling": {**SCALED["longrope"], "type": "longrope", "long_factor": [1.0]}},
        {"rope_scaling": LLAMA3},  # no ramp
    ],
)
def test_wrong_parameters_are_errors(rope, refused):
    with refused():
        make_layer_rotary(make_model({"model_type": "llama", **SIZES, **rope}), 0)
