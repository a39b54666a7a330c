"""Stored attention tensors <-> canonical weights, for the layouts and storages that a family file can name."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXModel

from kvfold.convert.errors import InputError
from kvfold.convert.families.layout import kv_config, read_layer, write_layer
from kvfold.convert.families.model import Family, load_family

CONFIG = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 24,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "attention_bias": True,
}


def variant(**attention) -> Family:
    """The llama family with another attention storage."""
    spec = load_family("llama").spec
    return Family(replace(spec, attention=replace(spec.attention, **attention)))


def fused(layout: str, storage: str = "out_in") -> Family:
    return variant(layout=layout, storage=storage, q=None, k=None, v=None, qkv="qkv")


def stored(family: Family, config: dict) -> dict[str, torch.Tensor]:
    shapes = {name: shape for name, shape in family.expected_tensors(config).items() if "self_attn" in name}
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("storage", ["out_in", "in_out"])
@pytest.mark.parametrize("layout", ["separate", "concatenated", "interleaved"])
def test_reading_and_writing_gives_the_same_bits(layout, storage, kv_heads):
    family = variant(storage=storage) if layout == "separate" else fused(layout, storage)
    config = {**CONFIG, "num_key_value_heads": kv_heads}
    tensors = stored(family, config)
    written = write_layer(family, config, 0, read_layer(family, config, 0, tensors.__getitem__))
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    assert all(tensor.is_contiguous() for tensor in written.values())


def test_concatenated_rows_are_queries_then_keys_then_values():
    family, config = fused("concatenated"), {**CONFIG, "num_key_value_heads": 3}
    tensors = stored(family, config)
    weights = read_layer(family, config, 0, tensors.__getitem__)
    rows = tensors["model.layers.0.self_attn.qkv.weight"].view(6 + 3 + 3, 4, 24)
    assert torch.equal(weights.q, rows[:6])
    assert torch.equal(weights.k, rows[6:9])
    assert torch.equal(weights.v, rows[9:])
    assert torch.equal(weights.v_bias, tensors["model.layers.0.self_attn.qkv.bias"].view(12, 4)[9:])


def test_interleaved_rows_are_those_of_gpt_neox():
    stock = GPTNeoXModel(
        GPTNeoXConfig(vocab_size=16, hidden_size=24, intermediate_size=8, num_hidden_layers=1, num_attention_heads=6)
    )
    attention = stock.layers[0].attention
    torch.nn.init.normal_(attention.query_key_value.bias)
    tensors = {
        "model.layers.0.self_attn.qkv.weight": attention.query_key_value.weight.data,
        "model.layers.0.self_attn.qkv.bias": attention.query_key_value.bias.data,
        "model.layers.0.self_attn.o_proj.weight": attention.dense.weight.data,
        "model.layers.0.self_attn.o_proj.bias": attention.dense.bias.data,
    }
    weights = read_layer(fused("interleaved"), CONFIG, 0, tensors.__getitem__)
    x = torch.randn(2, 5, 24)
    q, k, v = attention.query_key_value(x).view(2, 5, 6, 12).chunk(3, dim=-1)  # as the stock attention splits it
    for mine, stock_states, bias in ((weights.q, q, "q_bias"), (weights.k, k, "k_bias"), (weights.v, v, "v_bias")):
        torch.testing.assert_close(torch.einsum("bte,hde->bthd", x, mine) + getattr(weights, bias), stock_states)


def test_interleaved_groups_hold_their_queries_key_and_value():
    family, config = fused("interleaved"), {**CONFIG, "num_key_value_heads": 2}
    tensors = stored(family, config)
    weights = read_layer(family, config, 0, tensors.__getitem__)
    groups = tensors["model.layers.0.self_attn.qkv.weight"].view(2, 3 + 2, 4, 24)
    assert torch.equal(weights.q, groups[:, :3].reshape(6, 4, 24))
    assert torch.equal(weights.k, groups[:, 3])
    assert torch.equal(weights.v, groups[:, 4])


def test_in_out_storage_is_the_transpose():
    family = variant(storage="in_out")
    tensors = stored(family, {**CONFIG, "hidden_size": 20})
    weights = read_layer(family, {**CONFIG, "hidden_size": 20}, 0, tensors.__getitem__)
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (20, 24)
    assert torch.equal(weights.q.flatten(0, 1), tensors["model.layers.0.self_attn.q_proj.weight"].T)
    assert torch.equal(weights.o.flatten(1), tensors["model.layers.0.self_attn.o_proj.weight"].T)


def test_interleaved_rotary_storage_becomes_half_split(tiny_family):
    folder = tiny_family("cohere")
    config = json.loads((folder / "config.json").read_text())
    family = load_family("cohere")
    tensors = stored(family, config)
    weights = read_layer(family, config, 0, tensors.__getitem__)
    name = "model.layers.0.self_attn."
    rows = tensors[f"{name}q_proj.weight"].view(8, 8, 64)
    assert torch.equal(weights.q[:, :4], rows[:, 0::2])
    assert torch.equal(weights.q[:, 4:], rows[:, 1::2])
    assert torch.equal(weights.k_norm.weight[:, 4:], tensors[f"{name}k_norm.weight"][:, 1::2])
    assert torch.equal(weights.k_bias[:, :4], tensors[f"{name}k_proj.bias"].view(8, 8)[:, 0::2])
    assert torch.equal(weights.v.flatten(0, 1), tensors[f"{name}v_proj.weight"])


def test_the_stored_dtype_is_kept():
    family = load_family("llama")
    tensors = {name: tensor.bfloat16() for name, tensor in stored(family, CONFIG).items()}
    weights = read_layer(family, CONFIG, 0, tensors.__getitem__)
    assert {weights.q.dtype, weights.o.dtype, weights.k_bias.dtype} == {torch.bfloat16}


def test_roles_select_what_is_written():
    family = load_family("llama")
    weights = read_layer(family, CONFIG, 0, stored(family, CONFIG).__getitem__)
    written = write_layer(family, CONFIG, 0, weights, roles={"k", "o"})
    name = "model.layers.0.self_attn."
    assert set(written) == {f"{name}{part}_proj.{kind}" for part in "ko" for kind in ("weight", "bias")}


def test_a_shared_norm_must_stay_the_same_for_all_heads():
    family = load_family("qwen3")
    config = {**CONFIG, "model_type": "qwen3"}
    weights = read_layer(family, config, 0, stored(family, config).__getitem__)
    differing = replace(weights.k_norm, weight=torch.randn(6, 4))
    with pytest.raises(ValueError, match="the k norm is stored once for all heads, but its rows differ between heads"):
        write_layer(family, config, 0, replace(weights, k_norm=differing))


def test_biases_and_norms_without_a_place_are_refused():
    family = load_family("llama")
    weights = read_layer(family, CONFIG, 0, stored(family, CONFIG).__getitem__)
    plain = {**CONFIG, "attention_bias": False}
    with pytest.raises(ValueError, match="'llama' with this config has no place for q_bias, found one"):
        write_layer(family, plain, 0, weights)
    with pytest.raises(ValueError, match="'llama' with this config needs v_bias, found none"):
        write_layer(family, CONFIG, 0, replace(weights, v_bias=None))


def test_kv_config_changes_one_key():
    assert kv_config(load_family("llama"), CONFIG, 2) == {"num_key_value_heads": 2}


def test_kv_config_refuses_what_the_class_cannot_be():
    with pytest.raises(InputError, match="kv-heads is 4; a divisor of the 6 query heads was expected"):
        kv_config(load_family("llama"), CONFIG, 4)
    fixed = Family(replace(load_family("llama").spec, accepts_fewer_kv_heads=False))
    with pytest.raises(InputError, match="LlamaForCausalLM has as many key/value heads as query heads"):
        kv_config(fixed, CONFIG, 2)
