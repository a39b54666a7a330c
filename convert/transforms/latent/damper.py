"""A latent channel without a reader, which gives the tokens that a live norm would blow up their length.

A sink token has a key that draws half of every row of attention, and almost no value. In a latent it is short, and a
norm makes it as long as any other, its value too. A channel that is large on such tokens and small on all others gives
them the length without being read. With the averages by received attention, it is the row ``w`` with the largest

    E[r (w x)^2] / E[(w x)^2]
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.weights import LayerStatistics

RIDGE = 1e-4  # isotropic share of the inputs' energy: directions that the text hardly visits are no sinks


def with_damper(latent: LatentWeights, statistics: LayerStatistics) -> LatentWeights:
    """``latent`` with one more channel that nothing reads.

    ``statistics`` are of tokens counted alike, with averages by received attention. Raises ValueError without these.
    """
    row = sink_row(statistics.to(latent.down.device)).to(latent.down)
    pad = torch.nn.functional.pad
    return replace(latent, down=torch.cat([latent.down, row]), uk=pad(latent.uk, (0, 1)), uv=pad(latent.uv, (0, 1)))


def sink_row(statistics: LayerStatistics) -> Tensor:
    """``[1, E]``: the direction that received attention is largest in, relative to all tokens' energy; that is 1."""
    if statistics.received_gram is None:
        raise ValueError("statistics: expected averages by received attention, found none")
    gram = statistics.gram.clone()
    energy = gram.diagonal().mean()
    gram.diagonal().add_(RIDGE * torch.where(energy > 0, energy, 1.0))  # inputs that are all zero have no sinks
    root = torch.linalg.cholesky(gram)
    half = torch.linalg.solve_triangular(root, statistics.received_gram, upper=False)
    _, vectors = torch.linalg.eigh(torch.linalg.solve_triangular(root, half.mT, upper=False))
    row: Tensor = torch.linalg.solve_triangular(root.mT, vectors[:, -1:], upper=True).mT
    return row
