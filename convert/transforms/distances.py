"""How far keys count: the weight of every distance ``delta`` between a query and a key, one answer for every transform.

Calibration sequences of a few hundred tokens show at which distances a head attends. They do not show that keys further
away must keep their low scores, nor what happens at distances beyond them: a fit to the measured profile alone was
worth nothing at twice its length. So every fit counts a mixture over the whole context,

    p_h(delta) = (1 - uniform) ((1 - TAIL) profile_h(delta) + TAIL tail(delta)) + uniform flat(delta)

    profile_h(delta)                    the head's mean attention weight, as measured
    tail(delta) ~ 1 / (1 + delta)       every octave of distances alike
    flat(delta) ~ reach - delta         the distances of two tokens drawn from the context

What a transform needs of it are averages of rotations, `rotary_moments`. Tail and flat part are the same for all heads,
so their sums over the context are taken once and exactly; only the short profiles are summed head by head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TAIL = 0.5

FARTHEST = 131072

CHUNK = 4096  # distances at once: 8 MB of complex waves for 128 frequencies


@dataclass(frozen=True)
class Distances:
    """``p_h(delta) = share * profile[h, delta] + common[delta]``; ``profile [H, S]``, ``common [reach]``, float64.

    ``common`` sums to ``1 - share``; ``reach >= S``.
    """

    profile: Tensor
    common: Tensor
    share: float

    @property
    def weights(self) -> Tensor:
        """``p_h(delta)`` written out, ``[H, reach]``."""
        missing = self.common.numel() - self.profile.shape[1]
        return self.share * torch.nn.functional.pad(self.profile, (0, missing)) + self.common


def mixed_distances(profile: Tensor, context: int, uniform: float = 0.0) -> Distances:
    """The mixture of the module's docstring for ``profile [H, S]`` and a model that has to serve ``context`` positions.

    At least the ``S`` distances of the profile count, at most `FARTHEST` beyond it. ``uniform`` is the flat part's
    share.
    """
    profile = profile.double()
    reach = max(profile.shape[1], min(context, FARTHEST))
    ahead = torch.arange(reach, 0, -1, dtype=torch.float64, device=profile.device)
    tail, flat = 1 / ahead.flip(0), ahead
    common = (1 - uniform) * TAIL * tail / tail.sum() + uniform * flat / flat.sum()
    return Distances(profile, common, (1 - uniform) * (1 - TAIL))


def rotary_moments(distances: Distances, speed: Tensor) -> Tensor:
    """``E e^{-i (speed_a - speed_b) delta}`` for every head, complex ``[H, n, n]``, over its distances.

    ``speed [n]``, radians per position, float64: the second moment of the waves ``e^{-i speed delta}``. A speed of 0
    gives their means, a pair of speeds ``w, -w`` the averages of sums of angles.
    """
    common = _wave_moment(distances.common, speed)
    return torch.stack([distances.share * _wave_moment(row, speed) + common for row in distances.profile])


def _wave_moment(weights: Tensor, speed: Tensor) -> Tensor:
    """``sum_delta weights[delta] e^{-i (speed_a - speed_b) delta}``, ``[n, n]``, in chunks of distances."""
    result = torch.zeros(len(speed), len(speed), dtype=torch.complex128, device=speed.device)
    for start in range(0, len(weights), CHUNK):
        part = weights[start : start + CHUNK]
        angle = -speed[:, None] * torch.arange(start, start + len(part), device=speed.device)
        wave = torch.polar(torch.ones_like(angle), angle)
        result += (wave * part) @ wave.mH
    return result
