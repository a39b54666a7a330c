"""Calibration statistics of a layer: Gram matrices and means of its attention inputs, profiles of its heads."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvfold.attention.drift.profile import attention_sums
from kvfold.attention.drift.streams import LayerOutput
from kvfold.convert.transforms.weights import LayerStatistics

_GRAM_BLOCKS = 4


class StatisticsAccumulator:
    """Sums over the tokens of a layer, in float64: products of float32 numbers are exact there.

    The Gram matrices are built from the blocks on and above their diagonal (5/8 of the multiplications). Without
    ``profile`` nothing is measured of the attention: no distance profile (the result's is empty, ``[0, 0]``), and no
    averages by received attention.
    """

    def __init__(self, profile: bool = True) -> None:
        self._with_profile = profile
        self._inputs: _Moments | None = None
        self._received: _Moments | None = None
        self._profile: Tensor | None = None
        self._causal = True
        self._tokens = 0
        self._sequences = 0

    @torch.no_grad()
    def add(self, output: LayerOutput) -> None:
        """Add a batch of sequences (those of all batches must have one length)."""
        inputs = output.attention_input.flatten(0, -2).double()
        if self._inputs is None:
            self._inputs = _Moments.zeros(inputs)
        self._inputs.add(inputs)
        self._causal = output.causal
        self._tokens += inputs.shape[0]
        if self._with_profile:
            self._add_attention(output, inputs)

    def result(self) -> LayerStatistics:
        """The averages so far. Raises ValueError before the first batch."""
        if self._inputs is None:
            raise ValueError("statistics: expected at least one batch, found none")
        gram, mean = self._inputs.averages()
        if self._profile is None or self._received is None:
            return LayerStatistics(gram, mean, self._tokens, gram.new_zeros(0, 0), self._causal)
        profile = self._profile / self._sequences
        return LayerStatistics(gram, mean, self._tokens, profile, self._causal, *self._received.averages())

    def _add_attention(self, output: LayerOutput, inputs: Tensor) -> None:
        if output.query is None or output.key is None:
            raise ValueError("statistics: a distance profile needs the layer's queries and keys, found none")
        sequences = output.query.shape[0]
        profile, received = attention_sums(
            output.query, output.key, output.scale, window=output.window, causal=output.causal, softcap=output.softcap
        )
        weighted = profile.double() * sequences
        self._profile = weighted if self._profile is None else self._profile + weighted
        self._sequences += sequences
        if self._received is None:
            self._received = _Moments.zeros(inputs)
        self._received.add(inputs, received.flatten())


@dataclass(frozen=True)
class _Moments:
    """Sums of ``w x x^T [E, E]`` (blocks on and above the diagonal), of ``w x [E]`` and of ``w []``."""

    gram: Tensor
    sum: Tensor
    weight: Tensor

    @staticmethod
    def zeros(inputs: Tensor) -> "_Moments":
        """Of ``inputs [N, E]`` to come."""
        width = inputs.shape[-1]
        return _Moments(inputs.new_zeros(width, width), inputs.new_zeros(width), inputs.new_zeros(()))

    def add(self, inputs: Tensor, weight: Tensor | None = None) -> None:
        """Add ``inputs [N, E]``, each counted by ``weight [N]``."""
        weight = inputs.new_ones(len(inputs)) if weight is None else weight
        self.sum.add_(weight @ inputs)
        self.weight.add_(weight.sum())
        add_gram(self.gram, inputs * weight.sqrt()[:, None])

    def averages(self) -> tuple[Tensor, Tensor]:
        """The whole, symmetric average of ``x x^T``, and that of ``x``.

        Over the sum of the weights: rows of attention sum to 1 in float32 only, and a covariance must not be negative.
        """
        gram = self.gram.triu()
        gram += self.gram.triu(1).T
        return gram / self.weight, self.sum / self.weight


def add_gram(gram: Tensor, inputs: Tensor) -> None:
    """Add ``inputs^T inputs``, ``inputs [N, E]``, to the blocks on and above the diagonal of ``gram [E, E]``."""
    width = gram.shape[0]
    edges = [round(width * block / _GRAM_BLOCKS) for block in range(_GRAM_BLOCKS + 1)]
    for start, stop in pairwise(edges):
        gram[start:stop, start:].addmm_(inputs[:, start:stop].T, inputs[:, start:])
