"""Attention sinks: tokens that half of every row of attention falls on, and what a fit does about them.

Real decoders park attention on a few tokens, the first one above all, whose inputs are like no others. A sink is one
key among hundreds, so least squares over tokens hardly see it, yet an error there moves every row. Weighting tokens by
the attention that they receive mends that, but costs accuracy where there is no sink. So a layer is fitted both ways,
and its error on held-out sequences decides (`judged`).

In layout ``engine`` a live norm acts on the latent. A sink's latent is short, because its value is almost zero, and the
norm would make it as long as any other. `with_damper` adds a latent channel that nothing reads and that is large on
sinks alone, the row ``w`` with the largest ``E[r (w x)^2] / E[(w x)^2]``, ``r`` the attention a token receives.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.weights import LayerStatistics

# The shares of a token's weight tried that are the attention it receives (`LayerStatistics.counting_received`).
# 0 is plain least squares over tokens. 0.5 is not tuned: a sink and all other tokens then count about the same.
SHARES = (0.0, 0.5)

# Isotropic share of the inputs' energy in the denominator of `with_damper`: directions that the text hardly visits are
# no sinks. Not measured; held-out sequences decide whether a layer gets the channel.
DAMPER_RIDGE = 1e-4

Fitted = TypeVar("Fitted")


def judged(
    statistics: LayerStatistics, fit: Callable[[LayerStatistics], Fitted], judge: Callable[[Fitted], float]
) -> tuple[Fitted, float]:
    """The best of ``fit(statistics)`` over `SHARES` by the error ``judge`` gives it, the first of equals; its share.

    Without averages by received attention all tokens weigh the same, and ``judge`` is not called.
    """
    if statistics.received_gram is None:
        return fit(statistics), 0.0
    fits = {share: fit(statistics.counting_received(share)) for share in SHARES}
    best = min(SHARES, key=lambda share: judge(fits[share]))
    return fits[best], best


def with_damper(latent: LatentWeights, statistics: LayerStatistics) -> LatentWeights:
    """``latent`` with one more channel that nothing reads, large on attention sinks, of unit energy over all tokens.

    ``statistics`` weigh all tokens the same and hold averages by received attention; raises ValueError without these.
    """
    statistics = statistics.to(latent.down.device)
    if statistics.received_gram is None:
        raise ValueError("statistics: a damper needs averages by received attention, which were not measured")
    gram = statistics.gram.clone()
    energy = gram.diagonal().mean()
    # Inputs that are all zero have no sinks.
    gram.diagonal().add_(DAMPER_RIDGE * torch.where(energy > 0, energy, 1.0))
    # The generalized eigenproblem received w = lambda gram w, through the Cholesky root of gram.
    root = torch.linalg.cholesky(gram)
    half = torch.linalg.solve_triangular(root, statistics.received_gram, upper=False)
    _, vectors = torch.linalg.eigh(torch.linalg.solve_triangular(root, half.mT, upper=False))
    row = torch.linalg.solve_triangular(root.mT, vectors[:, -1:], upper=True).mT.to(latent.down)
    pad = torch.nn.functional.pad
    return replace(latent, down=torch.cat([latent.down, row]), uk=pad(latent.uk, (0, 1)), uv=pad(latent.uv, (0, 1)))
