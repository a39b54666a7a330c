"""Every family against transformers: the names and shapes of its files, and pooled checkpoints in the stock class."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import precision
from helpers.checkpoints import stock_model
from safetensors.torch import load_file, save_file

from kvfold.convert.families.family import load_family, supported
from kvfold.convert.families.layout import read_layer, write_layer
from kvfold.convert.families.model import model_of
from kvfold.convert.transforms.fold import pool

# Families whose class shares heads; the others are tested in targets/test_own_code.py.
SHARING = [name for name in supported() if load_family(name).sizes.kv_heads is not None]
TOLERANCE = precision.LOGITS


load = partial(stock_model, dtype=torch.float32)


def parts(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def save(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def pooled(source: Path, out: Path, kv_heads: int) -> Path:
    config, tensors = parts(source)
    model = model_of(config)
    for layer in range(model.geometry.layers):
        weights = pool.mean(read_layer(model, layer, tensors.__getitem__), kv_heads)
        written = write_layer(model, layer, weights, roles={"k", "v"})
        for name in model.attention_names(layer, {"k", "v"}):
            del tensors[name]  # one norm per head leaves fewer tensors than there were
        tensors |= written
    config |= model.kv_config(kv_heads)
    return save(out, config, tensors)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(5))
    return model(tokens).logits


def repeat_group_means(rows: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    """``rows [heads * n, ...]``: every head replaced by the mean of its group, group after group."""
    by_group = rows.reshape(groups, heads // groups, rows.shape[0] // heads, *rows.shape[1:])
    return by_group.mean(1, keepdim=True).expand_as(by_group).reshape(rows.shape)


@torch.no_grad()
def share_heads(model: torch.nn.Module, groups: int) -> torch.nn.Module:
    """The stock model at its own number of heads, keys and values of a group made equal: the definition, by hand."""
    heads = model.config.num_key_value_heads
    for layer in model.model.layers:
        attention = layer.self_attn
        if hasattr(attention, "qkv_proj"):
            weight = attention.qkv_proj.weight
            queries = model.config.num_attention_heads * attention.head_dim
            keys, values = weight[queries:].chunk(2)
            keys.copy_(repeat_group_means(keys, heads, groups))
            values.copy_(repeat_group_means(values, heads, groups))
            continue
        for projection in (attention.k_proj, attention.v_proj):
            for parameter in projection.parameters():
                parameter.copy_(repeat_group_means(parameter, heads, groups))
        norm = getattr(attention, "k_norm", getattr(attention, "k_layernorm", None))
        if hasattr(norm, "norms"):
            stacked = torch.stack([item.weight for item in norm.norms])
            for item, row in zip(norm.norms, repeat_group_means(stacked, heads, groups), strict=True):
                item.weight.copy_(row)
        elif norm is not None and norm.weight.numel() > attention.head_dim:
            norm.weight.copy_(repeat_group_means(norm.weight, heads, groups))
    return model


VARIANTS = [
    ("llama", {"tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False}),
    ("qwen2_moe", {"qkv_bias": False, "mlp_only_layers": [], "decoder_sparse_step": 1}),
    ("gemma", {"tie_word_embeddings": False, "attention_bias": True}),
    ("phi", {"qk_layernorm": False, "tie_word_embeddings": True}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": False, "use_qkv_bias": False}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    ("cohere", {"use_qk_norm": False, "attention_bias": False}),
    ("nemotron", {"attention_bias": False, "mlp_bias": False}),
]


@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in supported()), *VARIANTS], ids=str)
def test_expected_tensors_are_those_of_the_stock_file(name, changes, tiny_family):
    config, tensors = parts(tiny_family(name, **changes))
    model = model_of(config)
    shapes = {key: tensor.shape for key, tensor in model.tensors.items()}
    assert shapes == {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    assert model.tensor_problems(tensors) == []


@pytest.mark.parametrize("name", supported())
def test_every_tensor_has_a_role(name, tiny_family):
    config, tensors = parts(tiny_family(name))
    model = model_of(config)
    named = [name for names in model.names.values() for name in names]
    assert set(named) == set(tensors)
    fused = [name for name, tensor in model.tensors.items() if len(tensor.roles) > 1]
    assert len(named) == len(tensors) + 2 * len(fused)


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (8, 1)])  # sources that share heads, and that do not
def test_mean_pooling_is_the_stock_class_with_repeated_group_means(name, heads, groups, tiny_family, tmp_path):
    source = tiny_family(name, num_key_value_heads=heads)
    out = pooled(source, tmp_path / "out", groups)
    converted = load(out)
    assert converted.config.num_key_value_heads == groups
    expected = logits(share_heads(load(source), groups))
    torch.testing.assert_close(logits(converted), expected, **TOLERANCE)
    assert not torch.allclose(expected, logits(load(source)), rtol=1e-2, atol=1e-2), "pooling changed nothing to see"


@pytest.mark.parametrize(("name", "heads"), [(name, (8, 4)[at % 2]) for at, name in enumerate(SHARING)])
def test_as_many_groups_as_heads_gives_the_same_bits(name, heads, tiny_family, tmp_path):
    source = tiny_family(name, num_key_value_heads=heads)
    config, tensors = parts(source)
    model = model_of(config)
    for layer in range(model.geometry.layers):
        written = write_layer(model, layer, read_layer(model, layer, tensors.__getitem__))
        assert sorted(written) == sorted(model.attention_names(layer))
        assert all(torch.equal(tensor, tensors[key]) and tensor.is_contiguous() for key, tensor in written.items())
    assert torch.equal(logits(load(pooled(source, tmp_path / "out", heads))), logits(load(source)))
