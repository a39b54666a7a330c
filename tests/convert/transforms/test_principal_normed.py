"""Folding layers whose queries and keys are normalized before they rotate."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.layers import attend, normal, plain_rotary, relative_error, statistics_of
from torch import Tensor

from kvfold.convert.transforms.fold import principal
from kvfold.convert.transforms.linalg import pair_matrices
from kvfold.convert.transforms.weights import AttentionWeights, HeadNorm

E, D, H, TOKENS = 48, 16, 8, 24
ROTARY = plain_rotary(D)

KINDS = [
    pytest.param({"kind": "rms", "shared": True}, id="rms one row"),
    pytest.param({"kind": "rms", "shared": True, "offset": 1.0}, id="rms one row gain minus one"),
    pytest.param({"kind": "rms"}, id="rms row per head"),
    pytest.param({"kind": "rms", "extent": "flat"}, id="rms over all heads"),
    pytest.param({"kind": "layer", "shared": True}, id="layer one row"),
    pytest.param({"kind": "layer", "eps": 1e-5, "bias": True}, id="layer row per head with bias"),
    pytest.param({"kind": "layer", "extent": "flat", "bias": True}, id="layer over all heads with bias"),
]


def norm(seed: int, heads: int, kind: dict) -> HeadNorm:
    rows = 1 if kind.get("shared") else heads
    parameters = {key: value for key, value in kind.items() if key != "bias"}
    gain = (1.5 + 0.3 * normal(seed, rows, D)).expand(heads, D) - kind.get("offset", 0.0)
    bias = (0.2 * normal(seed + 1, rows, D)).expand(heads, D) if kind.get("bias") else None
    return HeadNorm(weight=gain, bias=bias, **parameters)


def make(kind: dict, kv_heads: int, spread: float = 1.0) -> AttentionWeights:
    """``spread``: how different the key/value heads are, each in a basis of its own."""
    angle = 7 * normal(9, kv_heads, D // 2)
    phases = pair_matrices(torch.polar(torch.ones_like(angle), angle), D)
    k = phases @ (normal(1, 1, D, E) + spread * normal(2, kv_heads, D, E))
    return AttentionWeights(
        q=phases.repeat_interleave(H // kv_heads, 0) @ normal(0, H, D, E),
        k=k,
        v=normal(3, 1, D, E) + spread * normal(4, kv_heads, D, E),
        o=normal(5, E, H, D),
        q_norm=norm(6, H, kind),
        k_norm=norm(7, kv_heads, kind),
    )


def inputs() -> Tensor:
    return normal(11, 4, TOKENS, E) @ (normal(12, E, E) / math.sqrt(E)) + 0.2


def error(found: AttentionWeights, wanted: AttentionWeights) -> float:
    return relative_error(attend(found, inputs(), ROTARY), attend(wanted, inputs(), ROTARY))


def rows_are_equal(norm: HeadNorm) -> bool:
    return torch.equal(norm.weight, norm.weight[:1].expand_as(norm.weight))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [4, 8])
def test_identical_heads_fold_exactly(kind: dict, kv_heads: int):
    one = make(kind, 2)
    repeat = kv_heads // 2

    def rows(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.repeat_interleave(repeat, 0)

    k_norm = replace(one.k_norm, weight=rows(one.k_norm.weight), bias=rows(one.k_norm.bias))
    weights = replace(one, k=rows(one.k), v=rows(one.v), k_norm=k_norm)
    groups = [list(range(repeat)), list(range(repeat, kv_heads))]
    assert error(principal.fold(weights, statistics_of(inputs(), H), ROTARY, groups), weights) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_norms_keep_their_kind_and_shapes(kind: dict):
    weights = make(kind, 4)
    folded = principal.fold(weights, statistics_of(inputs(), H), ROTARY, [[0, 2], [1, 3]])
    for found, wanted, heads in ((folded.q_norm, weights.q_norm, H), (folded.k_norm, weights.k_norm, 2)):
        assert found.weight.shape == (heads, D)
        assert (found.bias is None) == (wanted.bias is None)
        assert (found.kind, found.extent, found.shared) == (wanted.kind, wanted.extent, wanted.shared)
        assert (found.eps, found.offset) == (wanted.eps, wanted.offset)
        assert rows_are_equal(found) == wanted.shared
    assert folded.k_norm.bias is None or folded.k_norm.bias.shape == (2, D)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 1, 2, 3]]])
def test_sees_through_bases_where_pooling_fails(kind: dict, groups: list[list[int]]):
    weights = make(kind, 4, spread=0.2)
    folded = principal.fold(weights, statistics_of(inputs(), H), ROTARY, groups)
    members = [torch.tensor(group) for group in groups]

    def pooled(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.stack([tensor[index].mean(0) for index in members])

    k_norm = replace(weights.k_norm, weight=pooled(weights.k_norm.weight), bias=pooled(weights.k_norm.bias))
    mean = replace(weights, k=pooled(weights.k), v=pooled(weights.v), k_norm=k_norm)
    assert error(folded, weights) < 0.6 * error(mean, weights)


@pytest.mark.parametrize("norms", ["q", "k"])
def test_a_norm_on_one_side_alone(norms: str):
    weights = make({"kind": "rms", "shared": True}, 4, spread=0.2)
    weights = replace(weights, q=weights.q / 7) if norms == "k" else replace(weights, k=weights.k / 7)
    absent = {"k_norm": None} if norms == "q" else {"q_norm": None}
    weights = replace(weights, **absent)
    folded = principal.fold(weights, statistics_of(inputs(), H), ROTARY, [[0, 1], [2, 3]])
    assert (folded.q_norm is None) == (norms == "k")
    assert (folded.k_norm is None) == (norms == "q")
    assert error(folded, weights) < 0.45


def test_gain_of_zero_stays_silent():
    weights = make({"kind": "rms", "shared": True}, 4, spread=0.2)
    gain = weights.k_norm.weight.clone()
    gain[:, 3] = 0.0
    weights = replace(weights, k_norm=replace(weights.k_norm, weight=gain))
    folded = principal.fold(weights, statistics_of(inputs(), H), ROTARY, [[0, 1], [2, 3]])
    assert torch.isfinite(folded.k).all()
    assert torch.equal(folded.k_norm.weight[:, 3], torch.zeros(2))
