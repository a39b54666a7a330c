"""Rotary slots: energies by hand, the choice among layers, and what plain RoPE can say."""

import pytest
import torch
from helpers.layers import dense_distances, random_layer

from kvfold.convert.targets.mla.layout import find_rope_base
from kvfold.convert.transforms.latent import slots as rope_slots
from kvfold.convert.transforms.latent.slots import LayerSurvey
from kvfold.convert.transforms.weights import Rotary


def test_worth_is_the_energy_that_the_best_constant_loses():
    weights, statistics, x = random_layer(bias=True)
    # 6 of 8 dims rotate
    rotary = Rotary(torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64), amplitude=1.5)
    gains = rope_slots.compute_pair_gains(statistics, rotary, 0).abs().square()
    energy = torch.empty(3, 2, dtype=torch.float64)
    lost = torch.empty_like(energy)
    for pair in range(3):
        q = (x @ weights.q.mT + weights.q_bias[:, None]) * 1.5
        k = (x @ weights.k.mT + weights.k_bias[:, None]) * 1.5
        q, k = (
            torch.complex(part[..., pair], part[..., pair + 3]) for part in (q, k)
        )  # [heads, tokens]
        square = q.abs().square().mean(1)
        k = square.reshape(2, 2).sum(1).sqrt()[:, None] * k
        energy[pair] = torch.linalg.eigvalsh(k @ k.mH / k.shape[1]).flip(0)
        lost[pair] = energy[pair] * (1 - square @ gains[:, pair] / square.sum())
    found = rope_slots.survey_layer(weights, statistics, rotary)
    torch.testing.assert_close(found.worth, lost / energy.sum())


def test_gain_is_the_mean_turn_over_the_profile():
    _, statistics, _ = random_layer()
    theta = torch.tensor([0.7, 0.02], dtype=torch.float64)
    mixed = dense_distances(statistics.profile, 24, uniform=0.5, tail=0.5)
    turns = torch.polar(torch.ones(24, 2).double(), -torch.arange(24).double()[:, None] * theta)
    gains = rope_slots.compute_pair_gains(statistics, Rotary(theta), 24)
    torch.testing.assert_close(gains, mixed.cdouble() @ turns, rtol=0, atol=1e-12)


def test_choice_takes_the_worth_of_all_layers():
    theta = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    first = LayerSurvey(torch.tensor([[0.4, 0.3], [0.1, 0.0], [0.1, 0.1]]), theta)
    second = LayerSurvey(torch.tensor([[0.0, 0.0], [0.9, 0.0], [0.1, 0.0]]), theta)
    chosen = rope_slots.choose_rotary_slots([first, second], 6)
    assert chosen.keys_per_pair == (2, 1, 0)
    assert chosen.theta.tolist() == [1.0, 1.0, 0.5]


def test_stride_is_uniform_and_fills_up_evenly():
    theta = torch.arange(8, 0, -1, dtype=torch.float64)
    assert rope_slots.spread_rotary_slots(theta, 8).keys_per_pair == (1, 0, 1, 0, 1, 0, 1, 0)
    assert rope_slots.spread_rotary_slots(theta, 24).keys_per_pair == (2, 1, 2, 1, 2, 1, 2, 1)


@pytest.mark.parametrize(
    ("heavy", "counts", "base"),
    [
        (1, (1, 1, 1, 0, 0, 0, 0, 0), 10000 ** (3 / 8)),
        (3, (1, 0, 0, 1, 0, 0, 1, 0), 10000 ** (9 / 8)),
    ],
)
def test_plain_slots_take_the_step_that_is_worth_most(heavy, counts, base):
    theta = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    worth = torch.full((8, 1), 0.1)
    worth[[heavy, 2 * heavy]] = 1.0
    chosen = rope_slots.choose_stepped_rotary_slots([LayerSurvey(worth, theta)], 6)
    assert chosen.keys_per_pair == counts
    assert find_rope_base(chosen.theta.tolist()) == pytest.approx(base, rel=1e-9)
