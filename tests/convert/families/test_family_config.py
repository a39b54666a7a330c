"""Reading configs: spellings, defaults of the stock classes, errors that name the key, and problems
with tensors.
"""

from types import SimpleNamespace

import pytest
import tiny_models
import torch
from helpers.cases import read_cases
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvfold.convert.families.family import list_supported_model_types
from kvfold.convert.families.layer_io import make_layer_rotary
from kvfold.convert.families.model import make_model

CASES = read_cases(__file__)
LLAMA = CASES["llama"]


def headers(config):
    return {
        name: SimpleNamespace(shape=tensor.shape)
        for name, tensor in make_model(config).tensors.items()
    }


@pytest.mark.parametrize("name", list_supported_model_types())
def test_missing_keys_have_the_defaults_of_the_stock_class(name):
    """A config with only the sizes that kvfold insists on means to kvfold what it means to
    transformers.
    """
    tiny_models.skip_unknown(name)
    sizes = {key: LLAMA[key] for key in LLAMA if key not in ("model_type", "architectures")} | {
        "pad_token_id": 0
    }
    if name == "helium":  # whose class has 20 key/value heads by default
        sizes |= {"num_attention_heads": 40, "hidden_size": 5120}
    stock = AutoConfig.for_model(name, **sizes)
    config = {"model_type": name, **sizes}
    model = make_model(config)
    geometry = model.geometry
    values = model.values
    heads = 1 if name == "falcon" else stock.num_attention_heads
    assert geometry.kv_heads == (getattr(stock, "num_key_value_heads", None) or heads)
    assert geometry.head_dim == (getattr(stock, "head_dim", None) or 128)
    assert geometry.positions == getattr(
        stock, "max_position_embeddings", 2048
    )  # bloom and mpt have ALiBi
    for key in model.family.config:
        if hasattr(stock, key) and key not in (
            "layer_types",
            "no_rope_layers",
            "mlp_only_layers",
            "sliding_window",
        ):
            assert values[key] == (getattr(stock, key) or values[key]), key
    types = getattr(stock, "layer_types", None) or [None] * geometry.layers
    assert [layer.type for layer in model.layers] == types
    for index in [layer.index for layer in model.layers if layer.rotates]:
        # gptj has a number of its own, and no parameters
        tables = getattr(stock, "rope_parameters", {"rope_type": "default", "rope_theta": 1e4})
        rope = tables[types[index]] if model.family.rotary.by_type else tables
        share = rope.get("partial_rotary_factor", 1.0)
        dims = getattr(stock, "rotary_dim", int(geometry.head_dim * share))
        expected = rope["rope_theta"] ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)
        if rope["rope_type"] != "default":
            expected, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](stock, None)
        # transformers computes them in float32
        rotary = make_layer_rotary(model, index)
        torch.testing.assert_close(rotary.theta, expected.double(), rtol=2e-6, atol=0.0)


def values(case):
    return "-".join(f"{key}={value}" for key, value in case.items())[:60]


@pytest.mark.parametrize(("config", "reason"), CASES["explained"], ids=str)
def test_a_model_without_a_family_is_told_what_it_lacks(config, reason, refused):
    with refused(reason):
        make_model(config)


@pytest.mark.parametrize("changes", CASES["refused"], ids=values)
def test_a_wrong_value_or_an_unsupported_model_is_an_error(changes, refused):
    config = {**LLAMA, "num_key_value_heads": 32, "architectures": None, **changes}
    config = {key: value for key, value in config.items() if value != "absent"}
    with refused():
        make_model(config).check_config_values()


def test_tensor_problems_are_all_listed_in_the_terms_of_the_files():
    # Either spelling of the number of experts will do.
    config = {**LLAMA, "model_type": "mixtral", "num_key_value_heads": 8, "num_experts": 2}
    config["architectures"] = ["MixtralForCausalLM"]
    model = make_model(config)
    tensors = headers(config)
    assert model.list_tensor_problems(tensors) == []
    del tensors["model.layers.1.block_sparse_moe.experts.1.w1.weight"], tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = SimpleNamespace(shape=(512, 4096))
    tensors["model.layers.0.block_sparse_moe.experts.2.w1.weight"] = SimpleNamespace(shape=(3, 4))
    for buffer in ("inv_freq", "cos_cached", "sin_cached"):  # ColossalAI stores the last two
        name = f"model.layers.0.self_attn.rotary_emb.{buffer}"
        tensors[name] = SimpleNamespace(shape=(64,))
    missing, *others = model.list_tensor_problems(tensors)
    assert "experts.1.w1.weight" in missing
    assert "lm_head.weight" in missing
    assert [problem.split(": ")[0] for problem in others] == ["wrong shape", "unknown"]
