"""Every family against transformers: the names and shapes of its files, and what its conversions
compute.

Folds to the means of groups are the stock model with these means repeated; latent attention of full
size loses nothing.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import precision
from helpers.cases import mostly_slow
from helpers.checkpoints import stock_model, tensors
from safetensors.torch import save_file
from tiny_models import CLASSICS

from kvfold.attention import register_models
from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.families.family import list_supported_model_types
from kvfold.convert.families.layer_io import make_stored_tensors, read_attention_weights
from kvfold.convert.families.model import Model, make_model
from kvfold.convert.transforms.fold import pool

FULL = ["full_attention", "full_attention"]
PLAIN = {
    "mlp_bias": False,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
}
# What a model of the family must be like for the latent class to express it, and one context for
# all its layers.
LATENT = {
    "llama": {"mlp_bias": False},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "phi3": {"sliding_window": None},
    "smollm3": {"use_sliding_window": False, "no_rope_layers": [1, 1]},
    "granite": PLAIN,
    "hyperclovax": {**PLAIN, "use_post_norm": False},
    "cwm": {"layer_types": FULL},
    "ernie4_5": {"use_bias": False},
    "glm": {},
    "helium": {"mlp_bias": False},
    "internlm3": {"mlp_bias": False, "attention_bias": False},
    "iquestcoder": {},
    "ministral": {"layer_types": FULL},
    "ministral3": {
        "sliding_window": None,
        "rope_parameters": (
            {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.0}
            | {"original_max_position_embeddings": 16}
        ),
    },
    "seed_oss": {"mlp_bias": False},
}
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 16}
LATENT_VARIANTS = [
    ("llama", {"mlp_bias": False, "attention_bias": True, "num_key_value_heads": 8}),
    ("mistral", {"sliding_window": None, "head_dim": 16, "tie_word_embeddings": True}),
    ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.5}),
    ("smollm3", {"use_sliding_window": False, "no_rope_layers": [1, 0]}),
    *(
        (
            "llama",
            {
                "mlp_bias": False,
                "rope_parameters": {**ROPE, "rope_type": kind, "factor": 4.0, **others},
            },
        )
        for kind, others in {
            "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "linear": {},
            "yarn": {},
            "longrope": {name: [1.0, 2.0, 3.0, 4.0] for name in ("short_factor", "long_factor")},
        }.items()
    ),
]
# Logits of up to three, after layers without norms on queries and keys; without AVX-512 they differ
# by 1.3e-5.
TOLERANCE = {"rtol": 3 * precision.FLOAT32, "atol": 3 * precision.FLOAT32}


def tiny_model(folder: Path) -> tuple[Model, dict[str, torch.Tensor]]:
    return make_model(json.loads((folder / "config.json").read_text())), tensors(folder)


@torch.no_grad()
def logits(folder: Path, **options) -> torch.Tensor:
    tokens = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(5))
    return stock_model(folder, trust_remote_code=False, **options)(tokens).logits


def convert(source: Path, out: Path, **options) -> Path:
    convert_checkpoint(ConvertRequest(source, out, allow_growth=True, quiet=True, **options))
    return out


@pytest.mark.parametrize("name", list_supported_model_types())
def test_expected_tensors_are_those_of_the_stock_file_and_keep_their_bits(name, tiny_family):
    model, stored = tiny_model(tiny_family(name))
    shapes = {key: tuple(tensor.shape) for key, tensor in stored.items()}
    assert {key: tensor.shape for key, tensor in model.tensors.items()} == shapes
    named = [name for names in model.names_by_role.values() for name in names]
    fused = [name for name, tensor in model.tensors.items() if len(tensor.roles) > 1]
    assert set(named) == set(stored), "a tensor has no role"
    assert len(named) == len(stored) + 2 * len(fused)
    for layer in range(model.geometry.layers):
        written = make_stored_tensors(
            model, layer, read_attention_weights(model, layer, stored.__getitem__)
        )
        assert sorted(written) == sorted(model.list_attention_tensors(layer))
        for key, tensor in written.items():
            assert torch.equal(tensor, stored[key])
            assert tensor.is_contiguous()


@pytest.mark.parametrize(
    ("name", "heads", "groups"),
    mostly_slow(
        ((name, *((8, 1), (4, 2))[at % 2]) for at, name in enumerate(list_supported_model_types())),
        5,
    ),
)
def test_mean_pooling_is_the_stock_class_with_repeated_group_means(
    name, heads, groups, tiny_family, tmp_path
):
    """From sources that share heads, and that do not; classes that cannot share them become layout
    ``kvfold``.
    """
    register_models()
    source = tiny_family(name, **({} if name in CLASSICS else {"num_key_value_heads": heads}))
    model, stored = tiny_model(source)
    for layer in range(model.geometry.layers):
        weights = pool.average_heads(
            read_attention_weights(model, layer, stored.__getitem__), groups
        )
        copies = torch.arange(groups).repeat_interleave(model.geometry.kv_heads // groups)
        repeated = {}
        for role in ("k", "v", "k_bias", "v_bias"):
            rows = getattr(weights, role)
            repeated[role] = None if rows is None else rows[copies]
        if weights.k_norm is not None:
            repeated["k_norm"] = weights.k_norm.map(lambda rows, copies=copies: rows[copies])
        stored |= make_stored_tensors(model, layer, replace(weights, **repeated))
    shutil.copytree(source, tmp_path / "repeated")
    save_file(stored, tmp_path / "repeated" / "model.safetensors", {"format": "pt"})
    expected = logits(tmp_path / "repeated")
    out = convert(source, tmp_path / "out", to="gqa", kv_heads=groups, method="mean")
    torch.testing.assert_close(logits(out), expected, **TOLERANCE)
    assert not torch.allclose(expected, logits(source), rtol=1e-2, atol=1e-2), (
        "pooling changed nothing to see"
    )


def full_latent(source: Path, out: Path, **options) -> Path:
    size = tiny_model(source)[0].geometry
    split = {"rope_dim": size.rotary_dims * size.kv_heads, "kv_rank": size.model_dim + 1}
    return convert(source, out, to="mla", method="svd", **split, **options)


@pytest.mark.parametrize(
    ("name", "changes"), mostly_slow([*LATENT.items(), *LATENT_VARIANTS], 5), ids=str
)
def test_latent_attention_of_full_size_loses_nothing(name, changes, tiny_family, tmp_path):
    source = tiny_family(name, **{"num_key_value_heads": 2, **changes})
    out = full_latent(source, tmp_path / "out")
    assert (logits(out) - logits(source)).abs().max() < precision.CONVERTED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_changes_a_latent_no_more_than_the_source(dtype, tiny_family, tmp_path):
    source = tiny_family("llama", num_key_value_heads=2, mlp_bias=False)
    out = full_latent(source, tmp_path / "out", dtype=str(dtype).removeprefix("torch."))
    low, floor = (
        (logits(folder, dtype=dtype).float() - logits(source)).norm() for folder in (out, source)
    )
    assert low < 2 * floor


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # Keys are normalized behind their rotation, so they are pooled only.
        ("hunyuan_v1_dense", {"to": "gqa", "kv_heads": 4, "method": "principal"}),
        # Queries grow with their position.
        ("ministral3", {"to": "mla", "kv_rank": 8, "rope_dim": 4, "method": "svd"}),
    ],
)
def test_what_no_output_can_express_is_refused(name, options, tiny_family, tmp_path, refused):
    changes = {"sliding_window": None} if name == "ministral3" else {}
    with refused():
        convert(tiny_family(name, **changes), tmp_path / "out", **options)


def test_a_norm_for_each_head_is_refused_where_one_is_stored(tiny_family, refused):
    model, stored = tiny_model(tiny_family("qwen3"))
    weights = read_attention_weights(model, 0, stored.__getitem__)
    differing = replace(weights.k_norm, weight=torch.randn_like(weights.k_norm.weight))
    with refused(ValueError):
        make_stored_tensors(model, 0, replace(weights, k_norm=differing))
