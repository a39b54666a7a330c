"""Attention sinks: how much the tokens that attention falls on count in a fit.

Real decoders park attention on a few tokens, the first one above all, whose inputs are like no other's: half of every
row falls on a key that is one among hundreds, so least squares over tokens hardly see it, and an error there moves
every row. Counting tokens by the attention that they receive mends that, but costs where there is no sink. So a layer
is fitted both ways, and a judge that sees held-out sequences decides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvfold.convert.transforms.weights import LayerStatistics

SHARES = (0.0, 0.5)
"""The shares of a token's weight tried that are the attention it receives (`LayerStatistics.counting_received`)."""

Weights = TypeVar("Weights")


@dataclass(frozen=True)
class Judged(Generic[Weights]):
    """The fit that the judge liked best, its share of `SHARES`, and every share's error."""

    weights: Weights
    share: float
    errors: dict[float, float]


def judged(
    statistics: LayerStatistics,
    fit: Callable[[LayerStatistics], Weights],
    judge: Callable[[Weights], float],
) -> Judged[Weights]:
    """The best of ``fit(statistics)`` with tokens counted by each of `SHARES`; the first of equals.

    Without averages by received attention tokens count alike, and nothing is judged.
    """
    if statistics.received_gram is None:
        return Judged(fit(statistics), 0.0, {})
    fits = {share: fit(statistics.counting_received(share)) for share in SHARES}
    errors = {share: judge(weights) for share, weights in fits.items()}
    best = min(errors, key=lambda share: errors[share])
    return Judged(fits[best], best, errors)
