"""Calibration statistics of a layer: Gram matrix and mean of its attention inputs, distance profiles of its heads."""

from itertools import pairwise

import torch
from torch import Tensor

from kvfold.attention.drift.profile import distance_profile
from kvfold.attention.drift.streams import LayerOutput
from kvfold.convert.transforms.weights import LayerStatistics

_GRAM_BLOCKS = 4


class StatisticsAccumulator:
    """Sums over the tokens of a layer, in float64: products of float32 numbers are exact there.

    The Gram matrix is built from the blocks on and above its diagonal (5/8 of the multiplications). Without ``profile``
    no distance profile is taken and the result's is empty, ``[0, 0]``.
    """

    def __init__(self, profile: bool = True) -> None:
        self._with_profile = profile
        self._gram: Tensor | None = None
        self._sum: Tensor | None = None
        self._profile: Tensor | None = None
        self._causal = True
        self._tokens = 0
        self._sequences = 0

    @torch.no_grad()
    def add(self, output: LayerOutput) -> None:
        """Add a batch of sequences (those of all batches must have one length)."""
        inputs = output.attention_input.flatten(0, -2).double()
        if self._gram is None or self._sum is None:
            width = inputs.shape[-1]
            self._gram = inputs.new_zeros(width, width)
            self._sum = inputs.new_zeros(width)
        add_gram(self._gram, inputs)
        self._sum += inputs.sum(0)
        self._causal = output.causal
        self._tokens += inputs.shape[0]
        if self._with_profile:
            self._add_profile(output)

    def result(self) -> LayerStatistics:
        """The averages so far. Raises ValueError before the first batch."""
        if self._gram is None or self._sum is None:
            raise ValueError("statistics: expected at least one batch, found none")
        profile = self._gram.new_zeros(0, 0) if self._profile is None else self._profile / self._sequences
        gram = self._gram.triu()
        gram += self._gram.triu(1).T
        gram /= self._tokens
        return LayerStatistics(gram, self._sum / self._tokens, self._tokens, profile, self._causal)

    def _add_profile(self, output: LayerOutput) -> None:
        if output.query is None or output.key is None:
            raise ValueError("statistics: a distance profile needs the layer's queries and keys, found none")
        sequences = output.query.shape[0]
        profile = distance_profile(
            output.query, output.key, output.scale, window=output.window, causal=output.causal, softcap=output.softcap
        )
        weighted = profile.double() * sequences
        self._profile = weighted if self._profile is None else self._profile + weighted
        self._sequences += sequences


def add_gram(gram: Tensor, inputs: Tensor) -> None:
    """Add ``inputs^T inputs``, ``inputs [N, E]``, to the blocks on and above the diagonal of ``gram [E, E]``."""
    width = gram.shape[0]
    edges = [round(width * block / _GRAM_BLOCKS) for block in range(_GRAM_BLOCKS + 1)]
    for start, stop in pairwise(edges):
        gram[start:stop, start:].addmm_(inputs[:, start:stop].T, inputs[:, start:])
