"""The alternating fit of shared keys and queries against its own definition, by brute force over
distances.
"""

from dataclasses import replace

import pytest
import torch
from helpers.layers import dense_distances, normal, plain_rotary

from kvfold.convert.transforms.fold import heads
from kvfold.convert.transforms.fold.heads import GroupMoments, SharedHead
from kvfold.convert.transforms.linalg import multiply_pairs

D = 8
CONTEXT = 40


def moments(count, members):
    """``keys [m, D, m, D]`` and ``queries [n, D, D]`` of correlated random heads."""
    keys = normal(0, members * D, members * D)
    queries = normal(1, count, D, D)
    return (keys @ keys.T).reshape(members, D, members, D), queries @ queries.mT


def objective(head, group, weights, rot):
    """``sum_h E |(A q)^T R (sum_j B_j k_j) - q^T R k|^2``, one head and one distance after the
    other.
    """
    keys = group.keys
    queries = group.queries
    members = len(keys)
    repeat = len(queries) // len(keys)
    joint = keys.reshape(members * D, members * D)
    total = 0.0
    for h, (query, row) in enumerate(zip(queries, weights, strict=True)):
        own = torch.zeros(D, members * D, dtype=torch.float64)
        own[:, (h // repeat) * D : (h // repeat + 1) * D] = torch.eye(D, dtype=torch.float64)
        shared = torch.cat(list(head.encode), 1)
        for delta, weight in enumerate(row):
            turns = torch.polar(torch.ones_like(rot.theta), -rot.theta * delta)
            turned = multiply_pairs(torch.eye(D, dtype=torch.float64), turns)
            gap = head.decode[h] @ turned @ shared - turned @ own  # q^T gap [k_1 .. k_m]
            total += (weight * torch.trace(query @ gap @ joint @ gap.T)).item()
    return total


def case(dims, members=3, repeat=2):
    """The principal keys of a group, its moments, the attention profile of its query heads, and the
    rotation.
    """
    rot = plain_rotary(dims, 50.0)
    keys, queries = moments(members * repeat, members)
    profile = (2 * normal(4, len(queries), 10)).softmax(1)
    phi = heads.average_dim_rotations(profile, CONTEXT, rot, D)
    metric = torch.eye(D, dtype=torch.float64).expand(members, D, D)
    group = GroupMoments(keys, queries, values=keys, phi=phi, metric=metric, pairs=dims // 2)
    return heads.share_keys(group), group, profile, rot


@pytest.mark.parametrize("dims", [D, D // 2])
def test_lost_energy_is_the_objective(dims):
    start, group, profile, rot = case(dims)
    fitted = heads.fit_scores(start, group)
    weights = dense_distances(profile, CONTEXT)
    lost, total = heads.compute_score_errors_and_energies(fitted, group)
    assert lost.sum().item() == pytest.approx(objective(fitted, group, weights, rot), rel=1e-9)
    nothing = SharedHead(0 * start.encode, 0 * start.decode)
    assert total.sum().item() == pytest.approx(objective(nothing, group, weights, rot), rel=1e-9)


@pytest.mark.parametrize("dims", [D, D // 2])
def test_every_round_lowers_the_objective(dims):
    start, group, profile, rot = case(dims)
    errors = [objective(start, group, dense_distances(profile, CONTEXT), rot)]
    for rounds in (1, 2, 5, 10):
        fitted = heads.fit_scores(start, group, rounds)
        errors.append(objective(fitted, group, dense_distances(profile, CONTEXT), rot))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.95 * errors[0]


def test_dead_heads_stay_finite():
    start, group, *_ = case(D)
    fitted = heads.fit_scores(start, replace(group, keys=0 * group.keys, queries=0 * group.queries))
    assert torch.isfinite(fitted.encode).all()
    assert torch.isfinite(fitted.decode).all()
