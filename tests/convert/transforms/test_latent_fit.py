"""Latent attention from statistics: moments against drawn samples, identities, and that fitting
fits.
"""

from dataclasses import replace

import pytest
import torch
from helpers.layers import (
    attend,
    attend_latent,
    dense_distances,
    normal,
    random_layer,
    relative_error,
    turned,
)
from torch.testing import assert_close

from kvfold.convert.transforms.distances import DistanceMixture
from kvfold.convert.transforms.latent import als
from kvfold.convert.transforms.latent import slots as rope_slots
from kvfold.convert.transforms.latent.factorization import (
    balance_channels,
    factor_by_svd,
    factor_layer,
)
from kvfold.convert.transforms.latent.variants import factor_queries
from kvfold.convert.transforms.weights import Rotary

THETA = torch.tensor([1.0, 0.3, 0.05, 0.01], dtype=torch.float64)


def convert(weights, statistics, rotary, rope_dim, rank, **options):
    slots = rope_slots.choose_rotary_slots(
        [rope_slots.survey_layer(weights, statistics, rotary)], rope_dim
    )
    return factor_layer(weights, statistics, rotary, slots, rank, **options)


def latent_error(latent, weights, x, rotary=None):
    """The relative error of the layer's output for its first 20 inputs."""
    expected = attend(weights, x[:20][None], rotary or Rotary(THETA))[0]
    return relative_error(attend_latent(latent, x[:20]), expected)


def test_kernels_are_moments_at_random_distances_and_their_adjoints():
    profile = normal(0, 1, 9).softmax(1)
    x = normal(1, 40, 5) + 1
    rows = normal(2, 7, 5)
    keys = normal(3, 3, 5)
    frequencies = torch.tensor([0.9, 0.2]).double(), torch.tensor([0.5]).double()
    left = 0
    right = 0
    expected = 0
    for distance, weight in enumerate(profile[0]):
        y, z = (
            turned(x @ matrix.mT, -theta * distance)
            for matrix, theta in zip((rows, keys), frequencies, strict=True)
        )
        left = left + weight * y.mean(0)
        right = right + weight * z.mean(0)
        expected = expected + weight * y.mT @ z / len(x)
    _, kernel = als.make_rotation_moments(DistanceMixture(profile, 9), *frequencies)
    mean = x.mean(0)
    product = rows @ torch.cov(x.mT, correction=0) @ keys.mT
    (found,) = kernel.rotate_moment(product, rows @ mean, keys @ mean)
    torch.testing.assert_close(found, expected - torch.outer(left, right))

    weight = normal(4, 7, 3)
    (of_rows,), (of_means,) = kernel.compute_gradient_factors(weight)
    gradient = (of_rows * product).sum() + rows @ mean @ of_means @ (keys @ mean)
    torch.testing.assert_close((weight * found).sum(), gradient)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "rotary", [Rotary(THETA), Rotary(THETA[:2], amplitude=1.2), Rotary(THETA[:0])]
)
def test_enough_rank_is_exact(kv_heads, bias, rotary):
    weights, statistics, x = random_layer(kv_heads=kv_heads, bias=bias)
    slots = rope_slots.RotarySlots(
        (kv_heads,) * len(rotary.theta), rotary.theta.repeat_interleave(kv_heads)
    )
    if not rotary.dims:
        slots = rope_slots.RotarySlots((1, 1, 1, 0), THETA[:3])  # rotary rows are there, and zero
    latent = factor_layer(weights, statistics, rotary, slots, 24)
    assert latent_error(latent, weights, x, rotary) < 1e-8
    assert rotary.dims or not latent.rope_key.any()


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("inputs", ["usual", "zero", "one vector"])
@pytest.mark.parametrize("zeros", ["", "q", "k", "v", "o", "kv", "qkvo"])
def test_layers_without_energy_are_finite_and_exact(zeros, inputs, centered):
    weights, statistics, x = random_layer()
    weights = replace(weights, **{name: 0 * getattr(weights, name) for name in zeros})
    x = {"zero": 0 * x, "one vector": x[:1].expand_as(x)}.get(inputs, x)
    statistics = replace(statistics, gram=x.T @ x / len(x), mean=x.mean(0))
    slots = rope_slots.RotarySlots((2,) * 4, THETA.repeat_interleave(2))
    latent = factor_layer(weights, statistics, Rotary(THETA), slots, 24, centered=centered)
    assert all(
        value.isfinite().all() for value in vars(latent).values() if isinstance(value, torch.Tensor)
    )
    result = attend_latent(latent, x)
    expected = attend(weights, x[None], Rotary(THETA))[0]
    assert (result - expected).norm() <= 1e-5 * expected.norm()


def test_latent_has_unit_energy_and_mean_zero():
    weights, statistics, x = random_layer()
    latent = convert(weights, statistics, Rotary(THETA), 4, 6)
    c = x @ latent.down.T + latent.down_bias
    assert c.square().sum(1).mean().item() == pytest.approx(1, rel=1e-6)
    assert c.mean(0).abs().max() < 1e-9


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(("rope_dim", "rank"), [(4, 8), (8, 14)])
def test_every_round_lessens_the_error_it_is_about(monkeypatch, rope_dim, rank, centered):
    """Over inputs and distances that are independent, as the fit assumes, and as the tokens here
    are.
    """
    weights, statistics, x = random_layer(seed=3)
    errors = []
    for rounds in (0, 1, 4, 16):
        monkeypatch.setattr(als, "ALS_ROUNDS", rounds)
        latent = convert(weights, statistics, Rotary(THETA), rope_dim, rank, centered=centered)
        errors.append(output_error(weights, latent, statistics, x))
    assert errors[0] > errors[1] > errors[2] > errors[3]


def output_error(weights, latent, statistics, x):
    """Errors of scores, by the output that an average head makes, and errors of values."""
    values = x @ weights.v.repeat_interleave(weights.heads // weights.kv_heads, 0).mT
    c = x @ latent.down.T + (0 if latent.down_bias is None else latent.down_bias)
    wrong = c @ latent.uv.mT - values
    wrong = wrong - wrong.mean(1, keepdim=True) if latent.down_bias is not None else wrong
    out, lost = (
        torch.einsum("hnd,ehd->hne", rows, weights.o).square().sum(-1).mean(1).sum()
        for rows in (values - values.mean(1, keepdim=True), wrong)
    )
    scores = score_error(weights, latent, statistics, x) * latent.scale**2
    return (scores * out / weights.heads + als.VALUE_WEIGHT * lost).item()


def score_error(weights, latent, statistics, x):
    """Squared error of scores about each query's mean, summed over heads, queries and keys at
    distances drawn apart.
    """
    reach = statistics.profile.shape[1]
    profile = dense_distances(statistics.profile, reach, als.LATENT_UNIFORM, als.LATENT_TAIL)[
        ..., None
    ]
    own = x @ weights.k.repeat_interleave(weights.heads // weights.kv_heads, 0).mT
    shared = x @ latent.rope_key.T + (0 if latent.rope_key_bias is None else latent.rope_key_bias)
    still = (x @ latent.q_nope.mT) @ (x @ latent.down.T @ latent.uk.mT).mT
    gaps = []
    for distance in range(reach):
        wanted = (x @ weights.q.mT) @ turned(own, -THETA * distance).mT
        gaps.append(
            still + (x @ latent.q_rope.mT) @ turned(shared, -latent.theta * distance).mT - wanted
        )
    gaps = torch.stack(gaps, 1)  # [H, distance, query, key]
    squares, means = ((profile * part.mean(-1)).sum(1) for part in (gaps.square(), gaps))
    return (squares - means.square()).mean(1).sum()


def test_svd_is_exact_at_full_rank_and_worse_than_statistics_below():
    weights, statistics, x = random_layer(bias=True)
    full = factor_by_svd(weights, Rotary(THETA), rope_slots.spread_rotary_slots(THETA, 16), 24)
    assert latent_error(full, weights, x) < 1e-8
    small = factor_by_svd(weights, Rotary(THETA), rope_slots.spread_rotary_slots(THETA, 4), 8)
    fitted = convert(weights, statistics, Rotary(THETA), 4, 8)
    assert latent_error(fitted, weights, x) < latent_error(small, weights, x)


def test_query_latent_is_exact_at_full_rank_and_smaller_below():
    weights, statistics, _ = random_layer(bias=True)
    latent = convert(weights, statistics, Rotary(THETA), 4, 8)
    errors = []
    for rank in (12, 24):
        query = factor_queries(latent, statistics, rank).query
        assert query.down.shape == (rank, 24)
        found = torch.cat([query.q_nope, query.q_rope], 1) @ query.down
        errors.append(relative_error(found, torch.cat([latent.q_nope, latent.q_rope], 1)))
    assert errors[1] < 1e-8 < 1e-3 < errors[0] < 1


def test_balanced_channels_hold_as_much_energy_as_their_errors_cost():
    """Which is where the sum of all costs is least; products of the factors stay as they are."""
    heads, groups, dim, rope, rank = 4, 2, 6, 4, 5
    spread = 10 ** normal(7, rope, 1)
    latent = torch.linalg.qr(normal(8, 9, rank)).Q.mT
    factors = als.LatentFactors(
        torch.cat([normal(1, rope, 9) * spread, latent]),
        normal(2, heads, dim, rope + rank),
        normal(3, groups, dim, rank),
    )
    queries = normal(4, heads, dim, 8)
    queries = queries @ queries.mT
    metric = normal(5, groups, dim, 8)
    metric = metric @ metric.mT
    found = balance_channels(factors, queries, metric)
    for part in (slice(0, rope), slice(rope, None)):
        expected = factors.up_keys[..., part] @ factors.down[part]
        assert_close(found.up_keys[..., part] @ found.down[part], expected)
    expected = factors.up_values @ factors.down[rope:]
    assert_close(found.up_values @ found.down[rope:], expected)
    energy = found.down @ found.down.mT
    keys = torch.einsum("hdr,hde,hes->rs", found.up_keys, queries, found.up_keys)
    values = torch.einsum("gdr,gde,ges->rs", found.up_values, metric, found.up_values)
    latent = energy[rope:, rope:]
    keys = keys / (keys * energy).sum()
    cost = keys[rope:, rope:] + values / (values * latent).sum()
    ratio = latent[0, 0] / cost[0, 0]
    assert float(latent.trace()) == pytest.approx(1)
    assert_close(latent, ratio * cost)
    own = torch.linalg.eigvalsh(latent)
    assert latent.diagonal().max() < 1.5 / rank < own.max()
    pairs = [matrix.diagonal()[:rope].view(2, -1).sum(0) for matrix in (energy, keys)]
    assert_close(pairs[0], ratio * pairs[1])
