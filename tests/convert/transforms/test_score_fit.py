"""The alternating fit of shared keys and queries against its own definition, by brute force over distances."""

import pytest
import torch
from helpers.layers import plain_rotary
from torch import Tensor

from kvfold.convert.transforms.fold import score_fit
from kvfold.convert.transforms.fold.heads import SharedHead, share_keys
from kvfold.convert.transforms.linalg import pair_matrices
from kvfold.convert.transforms.weights import Rotary

D, CONTEXT = 8, 40


def moments(count: int, members: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """``keys [m, D, m, D]`` and ``queries [n, D, D]`` of correlated random heads."""
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(members * D, members * D, generator=draw, dtype=torch.float64)
    queries = torch.randn(count, D, D, generator=draw, dtype=torch.float64)
    return (keys @ keys.T).reshape(members, D, members, D), queries @ queries.mT


def dense_distances(profile: Tensor) -> Tensor:
    """The mixture that the module describes, ``[H, CONTEXT]``."""
    spread = 1 / (1 + torch.arange(CONTEXT, dtype=torch.float64))
    result = 0.5 * (spread / spread.sum()).repeat(len(profile), 1)
    result[:, : profile.shape[1]] += 0.5 * profile
    return result


def objective(head: SharedHead, keys: Tensor, queries: Tensor, weights: Tensor, rot: Rotary) -> float:
    """``sum_h E |(A q)^T R (sum_j B_j k_j) - q^T R k|^2``, one head and one distance after the other."""
    members, repeat = len(keys), len(queries) // len(keys)
    joint = keys.reshape(members * D, members * D)
    total = 0.0
    for h, (query, row) in enumerate(zip(queries, weights, strict=True)):
        own = torch.zeros(D, members * D, dtype=torch.float64)
        own[:, (h // repeat) * D : (h // repeat + 1) * D] = torch.eye(D, dtype=torch.float64)
        shared = torch.cat(list(head.encode), 1)
        for delta, weight in enumerate(row):
            turned = pair_matrices(torch.polar(torch.ones_like(rot.theta), -rot.theta * delta), D)
            rest = torch.arange(rot.dims, D)
            turned[rest, rest] = 1.0
            gap = head.decode[h] @ turned @ shared - turned @ own  # q^T gap [k_1 .. k_m]
            total += (weight * torch.trace(query @ gap @ joint @ gap.T)).item()
    return total


def case(dims: int, members: int = 3, repeat: int = 2) -> tuple[SharedHead, Tensor, Tensor, Tensor, Tensor, Rotary]:
    rot = plain_rotary(dims, 50.0)
    keys, queries = moments(members * repeat, members)
    profile = torch.rand(len(queries), 10, generator=torch.Generator().manual_seed(4), dtype=torch.float64) ** 3
    profile = profile / profile.sum(1, keepdim=True)
    weight = queries.reshape(members, repeat, D, D).sum(1)
    start = share_keys(keys, weight, dims // 2).repeat_decode(repeat)
    return start, keys, queries, profile, score_fit.distance_moments(profile, CONTEXT, rot, D), rot


@pytest.mark.parametrize("dims", [D, D // 2])
def test_lost_energy_is_the_objective(dims: int):
    start, keys, queries, profile, turn, rot = case(dims)
    fitted = score_fit.fit_scores(start, keys, queries, turn, rot.dims // 2)
    weights = dense_distances(profile)
    lost, total = score_fit.score_losses(fitted, keys, queries, turn, rot.dims // 2)
    assert lost.sum().item() == pytest.approx(objective(fitted, keys, queries, weights, rot), rel=1e-9)
    nothing = SharedHead(0 * start.encode, 0 * start.decode)
    assert total.sum().item() == pytest.approx(objective(nothing, keys, queries, weights, rot), rel=1e-9)


@pytest.mark.parametrize("dims", [D, D // 2])
def test_every_round_lowers_the_objective(dims: int):
    start, keys, queries, profile, turn, rot = case(dims)
    errors = [objective(start, keys, queries, dense_distances(profile), rot)]
    for rounds in (1, 2, 5, 10):
        fitted = score_fit.fit_scores(start, keys, queries, turn, rot.dims // 2, rounds)
        errors.append(objective(fitted, keys, queries, dense_distances(profile), rot))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.95 * errors[0]


def test_no_other_queries_do_better_once_it_settles():
    start, keys, queries, profile, turn, rot = case(D)
    fitted = score_fit.fit_scores(start, keys, queries, turn, rot.dims // 2, rounds=300)
    weights = dense_distances(profile)
    settled = objective(fitted, keys, queries, weights, rot)
    for seed in range(5):
        step = 1e-3 * torch.randn(fitted.decode.shape, generator=torch.Generator().manual_seed(seed)).double()
        for sign in (1, -1):
            moved = SharedHead(fitted.encode, fitted.decode + sign * step)
            assert objective(moved, keys, queries, weights, rot) > settled


def test_context_shorter_than_the_calibration_counts_what_was_seen():
    _, _, _, profile, _, rot = case(D)
    assert torch.equal(score_fit.distance_moments(profile, 1, rot, D), score_fit.distance_moments(profile, 10, rot, D))


def test_dead_heads_stay_finite():
    start, keys, queries, _, turn, rot = case(D)
    fitted = score_fit.fit_scores(start, 0 * keys, 0 * queries, turn, rot.dims // 2)
    assert torch.isfinite(fitted.encode).all()
    assert torch.isfinite(fitted.decode).all()
