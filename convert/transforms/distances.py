"""The weight of each distance ``delta`` between a query and a key, shared by all transforms.

Calibration sequences of a few hundred tokens show the distances at which a head attends. They do
not show that keys farther away must keep their low scores, nor what happens beyond the sequence
length: a fit to the measured profile alone fails at twice that length. So every fit averages over a
mixture of distances up to the full context,

    p_h(delta) = (1 - uniform) ((1 - TAIL) profile_h(delta) + TAIL tail(delta)) + uniform
    flat(delta)

    profile_h(delta)                    the head's mean attention weight, as measured
    tail(delta) ~ 1 / (1 + delta)       the same weight for every octave of distances
    flat(delta) ~ reach - delta         the distances of two tokens drawn from the context

Transforms use the mixture through averages of rotations (`compute_rotary_moments`), computed as
exact sums. The tail and the flat part are the same for all heads and layers, so the long sum over
the context is computed once per model; only the short profiles are summed for each head.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# Share of the tail. Excess loss of the reference MHA model in nats per token (measured by a script
# in git history with 64 samples, 2026-11-22), on text as long as the calibration or four times so:
#     share                        0      0.25   0.5    0.75   1
#     8 -> 2 heads, as long        0.191  0.035  0.041  0.047  0.053
#     8 -> 2 heads, four times     0.788         0.039
#     MLA 48 + 16, as long         0.086  0.076  0.076  0.085  0.102
# 8 -> 2 heads, 0.25 against 0.5, 32 samples, 2026-11-24: shipped model 0.026, 0.028; four times as
# long (128 tokens, two seeds) 0.017 and 0.018, 0.019 and 0.019, but the MHA model 0.055 and 0.034,
# 0.037 and 0.033: 0.5 is safe.
TAIL = 0.5

# The longest distance included, to limit time. The sum takes 1 CPU second once per model for heads
# with 128 dims, 0.2 for 8192 (measured by a script in git history).
FARTHEST = 131072

CHUNK = (
    4096  # distances summed at once: a limit on memory, 8 MB of complex waves for 128 frequencies
)


@dataclass(frozen=True)
class DistanceMixture:
    """A probability distribution over query-key distances ``delta < reach``, for each head: shares
    ``tail`` (1/delta-like) and ``flat`` (uniform positions), the rest is the measured ``profile [H,
    S]``. Float64.
    """

    profile: Tensor
    reach: int
    tail: float = 0.0
    flat: float = 0.0


def mix_distances(
    profile: Tensor, context: int, uniform: float = 0.0, tail: float = TAIL
) -> DistanceMixture:
    """Return a distribution over query-key distances that mixes the measured ``profile [H, S]``
    with longer distances, for a model that must support ``context`` positions.

    It covers the ``S`` distances of the profile or the context (at most `FARTHEST`), whichever is
    longer. ``uniform`` is the share of the flat part; ``tail`` is the tail's share of the rest.
    """
    reach = max(profile.shape[1], min(context, FARTHEST))
    return DistanceMixture(profile.double(), reach, (1 - uniform) * tail, uniform)


def compute_rotary_moments(distances: DistanceMixture, speed: Tensor) -> Tensor:
    """Return the average rotations ``E e^{-i (speed_a - speed_b) delta}`` over each head's
    query-key distances: complex128 ``[H, n, n]``.

    This is the second moment of the waves ``e^{-i speed delta}`` for ``speed [n]`` in radians per
    position. A speed of 0 yields their means, a pair of speeds ``w, -w`` the averages over sums of
    angles.
    """
    # Pass speeds to the cached function as a tuple: tensors hash by identity.
    common = _compute_moment_shared_by_heads(
        distances.reach, distances.tail, distances.flat, tuple(speed.double().tolist())
    )
    speed, common = (each.to(distances.profile.device) for each in (speed.double(), common))
    share = 1 - distances.tail - distances.flat
    return torch.stack(
        [share * _sum_rotary_moment(row, speed) + common for row in distances.profile]
    )


def average_rotation_factors(distances: DistanceMixture, theta: Tensor) -> Tensor:
    """Return each head's mean rotation by each of the angles ``theta [L]`` per position, ``E e^{-i
    theta_l delta}``: complex ``[H, L]``.
    """
    speed = theta.double()
    return compute_rotary_moments(distances, torch.cat([speed, speed.new_zeros(1)]))[:, :-1, -1]


@lru_cache(maxsize=16)
def _compute_moment_shared_by_heads(
    reach: int, tail: float, flat: float, speed: tuple[float, ...]
) -> Tensor:
    """Return the part of the average rotations that all heads share, ``[n, n]``: that of the
    ``tail`` and ``flat`` parts of a `DistanceMixture`.
    """
    ahead = torch.arange(reach, 0, -1, dtype=torch.float64)
    octaves = 1 / ahead.flip(0)
    weights = tail * octaves / octaves.sum() + flat * ahead / ahead.sum()
    return _sum_rotary_moment(weights, torch.tensor(speed, dtype=torch.float64))


def _sum_rotary_moment(weights: Tensor, speed: Tensor) -> Tensor:
    """Return ``sum_delta weights[delta] e^{-i (speed_a - speed_b) delta}``, ``[n, n]``, for
    ``weights [reach]`` and ``speed [n]`` in radians per position.
    """
    result = torch.zeros(len(speed), len(speed), dtype=torch.complex128, device=speed.device)
    # A single product would need memory for one wave per frequency and distance.
    for start in range(0, len(weights), CHUNK):
        part = weights[start : start + CHUNK]
        angle = -speed[:, None] * torch.arange(start, start + len(part), device=speed.device)
        wave = torch.polar(torch.ones_like(angle), angle)
        result += (wave * part) @ wave.mH
    return result
