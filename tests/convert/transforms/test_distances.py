"""The distances that count: the mixture written out, and averages of rotations against sums over
distances.
"""

import math

import pytest
import torch
from helpers.layers import dense_distances

from kvfold.convert.transforms import distances
from kvfold.convert.transforms.distances import compute_rotary_moments, mix_distances


def profile(heads=3, seen=16):
    draw = torch.rand(heads, seen, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return draw / draw.sum(1, keepdim=True)


@pytest.mark.parametrize("uniform", [0.0, 0.1])
def test_moments_are_sums_over_the_mixture(monkeypatch, uniform):
    monkeypatch.setattr(distances, "CHUNK", 7)
    speed = torch.tensor([1.0, 0.1, -0.1, 0.0], dtype=torch.float64)
    moments = compute_rotary_moments(mix_distances(profile(), 40, uniform), speed)
    weights = dense_distances(profile(), 40, uniform)
    torch.testing.assert_close(weights.sum(1), torch.ones(3, dtype=torch.float64))
    for head, row in enumerate(weights.tolist()):
        for a, first in enumerate(speed.tolist()):
            for b, second in enumerate(speed.tolist()):
                angles = [(first - second) * distance for distance in range(40)]
                expected = sum(
                    p * complex(math.cos(x), -math.sin(x)) for p, x in zip(row, angles, strict=True)
                )
                assert abs(moments[head, a, b].item() - expected) < 1e-12
