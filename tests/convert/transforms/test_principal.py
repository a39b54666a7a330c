"""The principal fold: what it keeps exactly, what it is invariant to, and that it beats pooling."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from helpers.layers import (
    NORMS,
    attend,
    head_norm,
    normal,
    plain_rotary,
    relative_error,
    statistics_of,
)
from torch import Tensor

from kvfold.convert.transforms.fold import principal
from kvfold.convert.transforms.fold.principal import compute_layer_moments
from kvfold.convert.transforms.linalg import multiply_pairs
from kvfold.convert.transforms.weights import AttentionWeights, Rotary

E = 48
D = 16
TOKENS = 24
ROTARY = plain_rotary(D)
ROTARIES = [ROTARY, plain_rotary(8), plain_rotary(0)]
BIASES = ["", "qkv", "qkvo", "o"]
PAIRS = [[0, 1], [2, 3]]
ALL = [[0, 1, 2, 3]]


def with_norms(weights, norm):
    if not norm:
        return weights
    q_norm, k_norm = (
        head_norm(*drawn, D, norm) for drawn in ((6, weights.heads), (7, weights.kv_heads))
    )
    return replace(weights, q_norm=q_norm, k_norm=k_norm)


def make(heads, kv_heads, seed=0, biases=""):
    draw = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64) / math.sqrt(shape[-1])

    shapes = {"q": (heads, D), "k": (kv_heads, D), "v": (kv_heads, D), "o": (E,)}
    extra = {f"{name}_bias": 3 * rand(*shapes[name]) for name in biases}
    q = 3 * rand(heads, D, E)
    k = 3 * rand(kv_heads, D, E)
    v = rand(kv_heads, D, E)
    return AttentionWeights(q, k, v, rand(E, heads, D), **extra)


def related(norm, spread):
    """Four heads that differ by ``spread``, each written in a basis of its own, as trained heads
    are.
    """
    one = make(4, 1, 5)
    other = make(4, 4, 6)
    turns = torch.linalg.qr(normal(5, 4, D, D))[0]
    angle = 7 * normal(9, 4, D // 2)
    phases = torch.polar(torch.ones_like(angle), angle)
    weights = replace(
        one,
        q=multiply_pairs(one.q / 2, phases),
        k=multiply_pairs(one.k + spread * other.k, phases),
        v=turns @ (one.v + spread * other.v),
        o=torch.einsum("ehd,hcd->ehc", one.o, turns),
    )
    return with_norms(weights, norm)


def changed(weights, change):
    """``change`` applied to all that is stored by key/value head."""
    stored = {name: getattr(weights, name) for name in ("k", "v", "k_bias", "v_bias")}
    changes = {name: change(rows) for name, rows in stored.items() if rows is not None}
    norm = weights.k_norm and weights.k_norm.map_tensors(change)
    return replace(weights, **changes, k_norm=norm)


def inputs(seed=1):
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(E, E, generator=draw, dtype=torch.float64) / math.sqrt(E)
    return torch.randn(4, TOKENS, E, generator=draw, dtype=torch.float64) @ mix + 0.3


def fold(weights, groups, rotary=ROTARY):
    moments = compute_layer_moments(weights, statistics_of(inputs(), weights.heads), rotary)
    return principal.fold_heads(moments, groups)


def fold_and_attend(weights, groups, rotary=ROTARY):
    return attend(fold(weights, groups, rotary), inputs(), rotary)


def check_equal(found, wanted):
    assert relative_error(found, wanted) < 1e-5


def error(found, wanted):
    return relative_error(attend(found, inputs(), ROTARY), attend(wanted, inputs(), ROTARY))


@pytest.mark.parametrize("biases", BIASES)
def test_groups_of_one_keep_every_bit(biases):
    weights = make(8, 4, biases=biases)
    folded = fold(weights, [[0], [1], [2], [3]])
    for name, wanted in vars(weights.map_tensors(Tensor.float)).items():
        found = getattr(folded, name)
        assert (wanted is None and found is None) or torch.equal(found, wanted), name


@pytest.mark.parametrize(
    ("rot", "biases", "norm"),
    [*itertools.product(ROTARIES, BIASES, [""]), *((ROTARY, "", norm) for norm in NORMS)],
)
@pytest.mark.parametrize(("heads", "members"), [(4, 2), (8, 2), (8, 4)])
def test_identical_heads_fold_exactly(rot, biases, norm, heads, members):
    weights = changed(
        with_norms(make(heads, 2, biases=biases), norm),
        lambda rows: rows.repeat_interleave(members, 0),
    )
    groups = [list(range(members)), list(range(members, 2 * members))]
    check_equal(fold_and_attend(weights, groups, rot), attend(weights, inputs(), rot))


def test_identical_heads_fold_exactly_beyond_the_calibration_text():
    weights = changed(make(4, 1), lambda rows: rows.repeat_interleave(4, 0))
    few = inputs()[:1, :5]  # 5 tokens span 5 of 48 input dims
    moments = compute_layer_moments(weights, statistics_of(few, 4), ROTARY)
    folded = principal.fold_heads(moments, ALL)
    x = inputs(seed=7)
    check_equal(attend(folded, x, ROTARY), attend(weights, x, ROTARY))


@pytest.mark.parametrize("biases", BIASES)
def test_rotations_of_value_heads_change_nothing(biases):
    weights = make(4, 4, biases=biases)
    turns = torch.linalg.qr(normal(3, 4, D, D))[0]
    bias = None if weights.v_bias is None else torch.einsum("hab,hb->ha", turns, weights.v_bias)
    rotated = replace(
        weights, v=turns @ weights.v, v_bias=bias, o=torch.einsum("ehd,hcd->ehc", weights.o, turns)
    )
    check_equal(fold_and_attend(rotated, PAIRS), fold_and_attend(weights, PAIRS))


@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("rot", ROTARIES[:2])
def test_phases_and_moduli_of_key_pairs_change_nothing(rot, biases):
    weights = make(8, 4, biases=biases)
    modulus = normal(3, 4, rot.dims // 2).sigmoid() + 0.5
    phase = 7 * normal(4, 4, rot.dims // 2)
    on_keys = torch.polar(modulus, phase)
    on_queries = torch.polar(1 / modulus, phase).repeat_interleave(2, 0)

    def multiply(rows, factors):
        if rows is None:
            return None
        return multiply_pairs(rows.reshape(len(rows), D, -1), factors).reshape(rows.shape)

    turned = replace(
        weights,
        q=multiply(weights.q, on_queries),
        k=multiply(weights.k, on_keys),
        q_bias=multiply(weights.q_bias, on_queries),
        k_bias=multiply(weights.k_bias, on_keys),
    )
    x = inputs()
    assert relative_error(attend(turned, x, rot), attend(weights, x, rot)) < 1e-12
    check_equal(fold_and_attend(turned, PAIRS, rot), fold_and_attend(weights, PAIRS, rot))


def test_unrotated_key_dims_may_mix():
    weights = make(4, 4)
    rot = plain_rotary(0)
    mix = normal(3, 4, D, D)
    mixed = replace(weights, k=mix @ weights.k, q=torch.linalg.inv(mix).mT @ weights.q)
    check_equal(fold_and_attend(mixed, ALL, rot), fold_and_attend(weights, ALL, rot))


def test_value_bias_is_exact_with_an_output_bias():
    weights = make(4, 4, biases="vo")
    x = inputs()
    plain = replace(weights, v_bias=torch.zeros_like(weights.v_bias))
    moved = attend(weights, x, ROTARY) - attend(plain, x, ROTARY)
    found = fold_and_attend(weights, ALL) - fold_and_attend(plain, ALL)
    torch.testing.assert_close(found, moved, rtol=0, atol=2e-6)


@pytest.mark.parametrize("norm", ["", *NORMS])
@pytest.mark.parametrize("groups", [PAIRS, ALL])
def test_sees_through_bases_where_pooling_fails(norm, groups):
    weights = related(norm, 0.25)
    pooled = changed(weights, lambda rows: rows.unflatten(0, (len(groups), -1)).mean(1))
    assert error(fold(weights, groups), weights) < 0.43 * error(pooled, weights)


def test_rotary_amplitude_counts_like_longer_queries_and_keys():
    """YaRN multiplies what it rotates, which weighs rotary dims more than unrotated ones."""
    plain = plain_rotary(8)
    loud = Rotary(plain_rotary(8).theta, amplitude=1.7)
    weights = make(4, 4)
    scale = torch.ones(D, 1, dtype=torch.float64)
    scale[:8] = loud.amplitude
    scaled = replace(weights, q=scale * weights.q, k=scale * weights.k)
    wanted = fold_and_attend(scaled, PAIRS, plain)
    check_equal(fold_and_attend(weights, PAIRS, loud), wanted)
    assert relative_error(fold_and_attend(weights, PAIRS, plain), wanted) > 0.1
