"""The principal fold: what it keeps exactly, what it is invariant to, and that it beats pooling."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.layers import attend, plain_rotary, relative_error, statistics_of
from torch import Tensor

from kvfold.convert.transforms.fold import principal
from kvfold.convert.transforms.linalg import pair_matrices
from kvfold.convert.transforms.weights import AttentionWeights, Rotary

E, D, TOKENS = 48, 16, 24


def make(heads: int, kv_heads: int, seed: int = 0, biases: str = "") -> AttentionWeights:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64) / math.sqrt(shape[-1])

    shapes = {"q": (heads, D), "k": (kv_heads, D), "v": (kv_heads, D), "o": (E,)}
    extra = {f"{name}_bias": 3 * normal(*shapes[name]) for name in biases}
    return AttentionWeights(
        q=3 * normal(heads, D, E),
        k=3 * normal(kv_heads, D, E),
        v=normal(kv_heads, D, E),
        o=normal(E, heads, D),
        **extra,
    )


def inputs(seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(E, E, generator=draw, dtype=torch.float64) / math.sqrt(E)
    return torch.randn(4, TOKENS, E, generator=draw, dtype=torch.float64) @ mix + 0.3


def fold_and_attend(weights: AttentionWeights, groups: list[list[int]], rotary: Rotary) -> Tensor:
    x = inputs()
    return attend(principal.fold(weights, statistics_of(x, weights.heads), rotary, groups), x, rotary)


def repeated(weights: AttentionWeights, members: int) -> AttentionWeights:
    """Every KV head (and the queries that read it stay as they are) stored ``members`` times."""

    def rows(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.repeat_interleave(members, 0)

    return replace(
        weights,
        k=weights.k.repeat_interleave(members, 0),
        v=weights.v.repeat_interleave(members, 0),
        k_bias=rows(weights.k_bias),
        v_bias=rows(weights.v_bias),
    )


ROTARIES = [
    pytest.param(plain_rotary(D), id="rotary"),
    pytest.param(plain_rotary(8), id="partial"),
    pytest.param(plain_rotary(0), id="nope"),
]
BIASES = ["", "qkv", "qkvo", "o"]


@pytest.mark.parametrize("rot", ROTARIES)
@pytest.mark.parametrize("biases", BIASES)
def test_groups_of_one_keep_every_bit(rot: Rotary, biases: str):
    weights = make(8, 4, biases=biases)
    folded = principal.fold(weights, statistics_of(inputs(), 8), rot, [[0], [1], [2], [3]])
    for name in ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias"):
        wanted, found = getattr(weights, name), getattr(folded, name)
        assert (wanted is None) == (found is None), name
        if wanted is not None:
            assert found.dtype == torch.float32
            assert torch.equal(found, wanted.float()), name


@pytest.mark.parametrize("rot", ROTARIES)
@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("heads", [4, 8])
def test_identical_heads_fold_exactly(rot: Rotary, biases: str, heads: int):
    weights = repeated(make(heads, 2, biases=biases), 2)
    assert relative_error(fold_and_attend(weights, [[0, 1], [2, 3]], rot), attend(weights, inputs(), rot)) < 1e-5


def test_identical_heads_fold_exactly_beyond_the_calibration_text():
    weights = repeated(make(4, 1), 4)
    few = inputs()[:1, :5]  # 5 tokens span 5 of 48 input dims
    folded = principal.fold(weights, statistics_of(few, 4), plain_rotary(D), [[0, 1, 2, 3]])
    x = inputs(seed=7)
    assert relative_error(attend(folded, x, plain_rotary(D)), attend(weights, x, plain_rotary(D))) < 1e-5


@pytest.mark.parametrize("biases", BIASES)
def test_rotations_of_value_heads_change_nothing(biases: str):
    weights, groups = make(4, 4, biases=biases), [[0, 1], [2, 3]]
    turns = torch.linalg.qr(torch.randn(4, D, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64))[0]
    bias = None if weights.v_bias is None else torch.einsum("hab,hb->ha", turns, weights.v_bias)
    rotated = replace(weights, v=turns @ weights.v, v_bias=bias, o=torch.einsum("ehd,hcd->ehc", weights.o, turns))
    found, wanted = (fold_and_attend(w, groups, plain_rotary(D)) for w in (rotated, weights))
    assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("rot", ROTARIES[:2])
def test_phases_and_moduli_of_key_pairs_change_nothing(rot: Rotary, biases: str):
    weights, groups = make(8, 4, biases=biases), [[0, 1], [2, 3]]
    draw = torch.Generator().manual_seed(3)
    modulus = torch.rand(4, rot.dims // 2, generator=draw, dtype=torch.float64) + 0.5
    phase = 7 * torch.rand(4, rot.dims // 2, generator=draw, dtype=torch.float64)
    keys = pair_matrices(torch.polar(modulus, phase), D)
    queries = pair_matrices(torch.polar(1 / modulus, phase), D).repeat_interleave(2, 0)
    rest = torch.arange(rot.dims, D)
    keys[:, rest, rest] = queries[:, rest, rest] = 1.0

    def times(maps: Tensor, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.einsum("hab,hb->ha", maps, tensor)

    turned = replace(
        weights,
        q=queries @ weights.q,
        k=keys @ weights.k,
        q_bias=times(queries, weights.q_bias),
        k_bias=times(keys, weights.k_bias),
    )
    x = inputs()
    assert relative_error(attend(turned, x, rot), attend(weights, x, rot)) < 1e-12
    found, wanted = (fold_and_attend(w, groups, rot) for w in (turned, weights))
    assert relative_error(found, wanted) < 1e-5


def test_unrotated_key_dims_may_mix():
    weights, groups, rot = make(4, 4), [[0, 1, 2, 3]], plain_rotary(0)
    mix = torch.randn(4, D, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mixed = replace(weights, k=mix @ weights.k, q=torch.linalg.inv(mix).mT @ weights.q)
    found, wanted = (fold_and_attend(w, groups, rot) for w in (mixed, weights))
    assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize("rot", ROTARIES)
def test_relabeled_heads_fold_the_same(rot: Rotary):
    weights = make(8, 4)
    moved = principal.ordered(weights, [[2], [0], [3], [1]])  # source head 2 is now head 0, ...
    found = fold_and_attend(moved, [[1, 0], [3, 2]], rot)
    assert relative_error(found, fold_and_attend(weights, [[0, 2], [1, 3]], rot)) < 1e-6


def test_value_bias_is_exact_with_an_output_bias():
    weights, x = make(4, 4, biases="vo"), inputs()
    groups = [[0, 1, 2, 3]]
    plain = replace(weights, v_bias=torch.zeros_like(weights.v_bias))
    moved = attend(weights, x, plain_rotary(D)) - attend(plain, x, plain_rotary(D))
    found = fold_and_attend(weights, groups, plain_rotary(D)) - fold_and_attend(plain, groups, plain_rotary(D))
    torch.testing.assert_close(found, moved, rtol=0, atol=2e-6)


def test_value_bias_without_output_bias_keeps_the_mean_output():
    weights, x = make(4, 4, biases="v"), inputs()
    rot = plain_rotary(0)
    uniform = replace(weights, q=torch.zeros_like(weights.q))  # every token averages its past
    found = fold_and_attend(uniform, [[0, 1], [2, 3]], rot)
    wanted = attend(uniform, x, rot)
    mean = statistics_of(x, 4).mean
    v = torch.einsum("hde,e->hd", weights.v, mean) + weights.v_bias
    assert relative_error(found[:, -1].mean(0), wanted[:, -1].mean(0)) < 0.15
    assert torch.einsum("ehd,hd->e", weights.o, v).norm() > 1


def related(seed: int = 5) -> AttentionWeights:
    """Four heads that do nearly the same, each written in a basis of its own, as trained heads are."""
    one, other = make(4, 1, seed), make(4, 4, seed + 1)
    draw = torch.Generator().manual_seed(seed)
    turns = torch.linalg.qr(torch.randn(4, D, D, generator=draw, dtype=torch.float64))[0]
    phases = pair_matrices(torch.polar(torch.ones(4, D // 2), 7 * torch.rand(4, D // 2, generator=draw)).cdouble(), D)
    return replace(
        one,
        q=phases @ one.q / 2,
        k=phases @ (one.k + other.k / 4),
        v=turns @ (one.v + other.v / 4),
        o=torch.einsum("ehd,hcd->ehc", one.o, turns),
    )


def test_sees_through_bases_where_pooling_fails():
    weights, x, rot = related(), inputs(), plain_rotary(D)
    wanted = attend(weights, x, rot)
    pooled = replace(weights, k=weights.k.mean(0, keepdim=True), v=weights.v.mean(0, keepdim=True))
    assert relative_error(attend(pooled, x, rot), wanted) > 0.7
    assert relative_error(fold_and_attend(weights, [[0, 1, 2, 3]], rot), wanted) < 0.3


def test_keys_keep_the_mean_norm_of_their_members():
    weights = make(4, 4)
    folded = principal.fold(weights, statistics_of(inputs(), 4), plain_rotary(D), [[0, 1, 2, 3]])
    for pair in range(D // 2):
        dims = [pair, pair + D // 2]
        wanted = weights.k[:, dims].flatten(1).norm(dim=1).mean()
        assert folded.k[0, dims].norm().item() == pytest.approx(wanted.item(), rel=1e-5)


def test_rotary_amplitude_counts_like_longer_queries_and_keys():
    """yarn multiplies what it rotates: with unrotated dims beside, that shifts what the fit minds."""
    plain, loud = plain_rotary(8), Rotary(plain_rotary(8).theta, amplitude=1.7)
    weights = make(4, 4)
    scale = torch.ones(D, 1, dtype=torch.float64)
    scale[:8] = loud.amplitude
    wanted = fold_and_attend(replace(weights, q=scale * weights.q, k=scale * weights.k), [[0, 1], [2, 3]], plain)
    assert relative_error(fold_and_attend(weights, [[0, 1], [2, 3]], loud), wanted) < 1e-5
    assert relative_error(fold_and_attend(weights, [[0, 1], [2, 3]], plain), wanted) > 0.1


@pytest.mark.parametrize("groups", [[[0, 1], [2]], [[0, 1], [1, 2]], [[0, 1, 2, 3, 4]], [[0], [1, 2, 3]], []])
def test_groups_that_are_no_partition_are_refused(groups: list[list[int]]):
    with pytest.raises(ValueError, match="must hold each of 4 KV heads once, in groups of one size"):
        principal.fold(make(4, 4), statistics_of(inputs(), 4), plain_rotary(D), groups)
