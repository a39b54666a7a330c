"""Every family against transformers: the names and shapes of its files, and what its conversions
compute.

Folds to the means of groups are the stock model with these means repeated; latent attention of full
size loses nothing.
"""

import shutil
from dataclasses import replace

import pytest
import torch
from helpers import precision
from helpers.cases import mostly_slow, read_cases
from helpers.checkpoints import compute_logits, convert, full_split, read_model, tensors
from safetensors.torch import save_file
from tiny_models import CLASSICS

from kvfold.attention import register_models
from kvfold.convert.families.family import list_supported_model_types
from kvfold.convert.families.layer_io import make_stored_tensors, read_attention_weights
from kvfold.convert.transforms.fold import pool

CASES = read_cases(__file__)


def tiny_model(folder):
    return read_model(folder), tensors(folder)


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
    "name",
    mostly_slow([name for name in list_supported_model_types() if name not in CLASSICS], 8),
)
def test_repeated_heads_compute_the_same(name, tiny_family, out):
    source = tiny_family(name, num_key_value_heads=2)
    convert(source, out, kv_heads=4, method=None)
    assert read_model(out).geometry.kv_heads == 4
    torch.testing.assert_close(
        compute_logits(out), compute_logits(source), **precision.LARGE_LOGITS
    )


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
            repeated["k_norm"] = weights.k_norm.map_tensors(
                lambda rows, copies=copies: rows[copies]
            )
        stored |= make_stored_tensors(model, layer, replace(weights, **repeated))
    shutil.copytree(source, tmp_path / "repeated")
    save_file(stored, tmp_path / "repeated" / "model.safetensors", {"format": "pt"})
    expected = compute_logits(tmp_path / "repeated")
    out = convert(source, tmp_path / "out", groups)
    torch.testing.assert_close(compute_logits(out), expected, **precision.LARGE_LOGITS)
    assert not torch.allclose(expected, compute_logits(source), rtol=1e-2, atol=1e-2), (
        "pooling changed nothing to see"
    )


# What a model of the family must be like for the latent class to express it, and one context for
# all its layers.
@pytest.mark.parametrize(("name", "changes"), mostly_slow(CASES["latent"], 5), ids=str)
def test_latent_attention_of_full_size_loses_nothing(name, changes, tiny_family, tmp_path):
    source = tiny_family(name, **{"num_key_value_heads": 2, **changes})
    out = convert(source, tmp_path / "out", **full_split(source, 1))
    assert (compute_logits(out) - compute_logits(source)).abs().max() < precision.CONVERTED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_changes_a_latent_no_more_than_the_source(dtype, tiny_family, tmp_path):
    source = tiny_family("llama", num_key_value_heads=2, mlp_bias=False)
    low_dtype = str(dtype).removeprefix("torch.")
    out = convert(source, tmp_path / "out", dtype=low_dtype, **full_split(source, 1))
    low, floor = (
        (compute_logits(folder, dtype=dtype).float() - compute_logits(source)).norm()
        for folder in (out, source)
    )
    assert low < 2 * floor


# Keys of hunyuan_v1_dense are normalized behind their rotation, so they are pooled only; queries of
# ministral3 grow with their position.
@pytest.mark.parametrize(("name", "changes", "options"), CASES["refused"])
def test_what_no_output_can_express_is_refused(name, changes, options, tiny_family, out, refused):
    with refused():
        convert(tiny_family(name, **changes), out, **options)
