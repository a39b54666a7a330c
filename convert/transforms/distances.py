"""The weight of every distance ``delta`` between a query and a key, the same for every transform.

Calibration sequences of a few hundred tokens show at which distances a head attends. They do not show that keys further
away must keep their low scores, nor what happens at distances beyond them: a fit to the measured profile alone was
worth nothing at twice its length. So every fit counts a mixture over the whole context,

    p_h(delta) = (1 - uniform) ((1 - TAIL) profile_h(delta) + TAIL tail(delta)) + uniform flat(delta)

    profile_h(delta)                    the head's mean attention weight, as measured
    tail(delta) ~ 1 / (1 + delta)       every octave of distances alike
    flat(delta) ~ reach - delta         the distances of two tokens drawn from the context

What a transform needs of it are averages of rotations, `rotary_moments`: exact sums. Tail and flat part are the same
for all heads and layers, so the long sum over the context is taken once per model; only the short profiles are summed
head by head.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

TAIL = 0.5
"""Share of the tail. Excess loss of a trained model, nats per token (bench_constants.py --samples 64 in recipes):

    share                                                    0      0.25   0.5    0.75   1
    8 -> 2 heads, text as long as the calibration            0.191  0.035  0.041  0.047  0.053
    8 -> 2 heads, four times as long                         0.788         0.039
    MLA 48 + 16, text as long as the calibration             0.086  0.076  0.076  0.085  0.102
"""

FARTHEST = 131072
"""Distances beyond do not count: each octave of the tail adds ever less, and contexts are rarely longer.

The sum takes 1 CPU second once per model for heads of 128 dims, 0.2 for 8192 (bench_constants.py --distances).
"""

CHUNK = 4096  # distances at once: 8 MB of complex waves for 128 frequencies


@dataclass(frozen=True)
class Distances:
    """``p_h(delta)``, ``delta < reach``: shares ``tail`` and ``flat``, the rest as in ``profile [H, S]``, float64."""

    profile: Tensor
    reach: int
    tail: float = 0.0
    flat: float = 0.0

    @property
    def weights(self) -> Tensor:
        """``p_h(delta)`` written out, ``[H, reach]``."""
        seen = torch.nn.functional.pad(self.profile, (0, self.reach - self.profile.shape[1]))
        common = _common_weights(self.reach, self.tail, self.flat).to(seen.device)
        return (1 - self.tail - self.flat) * seen + common


def mixed_distances(profile: Tensor, context: int, uniform: float = 0.0, tail: float | None = None) -> Distances:
    """The mixture of the module's docstring for ``profile [H, S]`` and a model that has to serve ``context`` positions.

    At least the ``S`` distances of the profile count, and no others beyond `FARTHEST`. ``uniform`` is the flat part's
    share, ``tail`` (default `TAIL`) the tail's of the rest.
    """
    reach = max(profile.shape[1], min(context, FARTHEST))
    share = TAIL if tail is None else tail
    return Distances(profile.double(), reach, (1 - uniform) * share, uniform)


def rotary_moments(distances: Distances, speed: Tensor) -> Tensor:
    """``E e^{-i (speed_a - speed_b) delta}`` for every head, complex ``[H, n, n]``, over its distances.

    ``speed [n]``, radians per position, float64: the second moment of the waves ``e^{-i speed delta}``. A speed of 0
    gives their means, a pair of speeds ``w, -w`` the averages of sums of angles.
    """
    speed = speed.double()
    common = _common_moment(distances.reach, distances.tail, distances.flat, tuple(speed.tolist()))
    share = 1 - distances.tail - distances.flat
    return torch.stack([share * _wave_moment(row, speed) + common.to(speed.device) for row in distances.profile])


def _common_weights(reach: int, tail: float, flat: float) -> Tensor:
    """Tail and flat part of the mixture, ``[reach]``; they sum to ``tail + flat``."""
    ahead = torch.arange(reach, 0, -1, dtype=torch.float64)
    octaves = 1 / ahead.flip(0)
    return tail * octaves / octaves.sum() + flat * ahead / ahead.sum()


@lru_cache(maxsize=16)
def _common_moment(reach: int, tail: float, flat: float, speed: tuple[float, ...]) -> Tensor:
    """`_wave_moment` of the part of the mixture that all heads of a model share."""
    return _wave_moment(_common_weights(reach, tail, flat), torch.tensor(speed, dtype=torch.float64))


def _wave_moment(weights: Tensor, speed: Tensor) -> Tensor:
    """``sum_delta weights[delta] e^{-i (speed_a - speed_b) delta}``, ``[n, n]``, in chunks of distances."""
    result = torch.zeros(len(speed), len(speed), dtype=torch.complex128, device=speed.device)
    for start in range(0, len(weights), CHUNK):
        part = weights[start : start + CHUNK]
        angle = -speed[:, None] * torch.arange(start, start + len(part), device=speed.device)
        wave = torch.polar(torch.ones_like(angle), angle)
        result += (wave * part) @ wave.mH
    return result
