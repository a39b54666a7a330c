"""Calibration statistics of a layer: Gram matrices and means of its attention inputs, profiles of its heads.

Stock classes that do not call transformers' attention functions (bloom, falcon, gptj, mpt) show no queries and keys;
`with_heads` computes them from the attention's inputs and the layer's weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kvfold.attention.drift.frame import Arguments
from kvfold.attention.drift.profile import attention_sums
from kvfold.attention.drift.recording import LayerOutput
from kvfold.attention.rotary import apply_rotary, rotary_tables
from kvfold.convert import processes
from kvfold.convert.transforms.head_norms import has_norms, project
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary

# With B blocks along a side, (B + 1) / 2B of the multiplications are left: 5/8 with 4, 9/16 with 8.
_GRAM_BLOCKS = 4


class StatisticsAccumulator:
    """Sums over the tokens of a layer, in float64: products of float32 numbers are exact there.

    The Gram matrices are built from the blocks on and above their diagonal (5/8 of the multiplications). Without
    ``profile`` nothing is measured of the attention: no distance profile (the result's is empty, ``[0, 0]``), and no
    averages by received attention. ``weights`` are the layer's, for what is behind its norms on queries and keys.
    """

    def __init__(self, profile: bool = True, weights: AttentionWeights | None = None) -> None:
        self._with_profile = profile
        self._weights = weights if weights is not None and has_norms(weights) else None
        self._normed: _NormedMoments | None = None
        self._inputs: _Moments | None = None
        self._received: _Moments | None = None
        self._profile: Tensor | None = None
        self._tokens = 0
        self._sequences = 0

    @torch.no_grad()
    def add(self, output: LayerOutput) -> None:
        """Add a batch of sequences (those of all batches must have one length)."""
        inputs = output.attention_input.flatten(0, -2).double()
        if self._inputs is None:
            self._inputs = _Moments.zeros(inputs)
        self._inputs.add(inputs)
        self._tokens += inputs.shape[0]
        received = self._add_attention(output, inputs) if self._with_profile else None
        if self._weights is not None:
            normed, divisors = project(self._weights, inputs)
            if self._normed is None:
                self._normed = _NormedMoments.zeros(normed, inputs)
            self._normed.add(normed, divisors, inputs, received)

    def result(self) -> LayerStatistics:
        """The averages so far, over the batches of all processes. Raises ValueError before the first batch."""
        if self._inputs is None:
            raise ValueError("statistics: expected at least one batch, found none")
        sums = [self._inputs, self._received, self._normed]
        processes.add_up(tensor for each in sums if each is not None for tensor in vars(each).values())
        processes.add_up([] if self._profile is None else [self._profile])
        tokens, sequences = processes.total(self._tokens, self._sequences)
        gram, mean = self._inputs.averages()
        profile = gram.new_zeros(0, 0) if self._profile is None else self._profile / sequences
        result = LayerStatistics(gram, mean, int(tokens), profile)
        if self._received is not None:
            received_gram, received_mean = self._received.averages()
            result = replace(result, received_gram=received_gram, received_mean=received_mean)
        return result if self._normed is None else self._normed.into(result)

    def _add_attention(self, output: LayerOutput, inputs: Tensor) -> Tensor:
        """The attention that each token received ``[N]``."""
        if output.query is None or output.key is None:
            raise ValueError("statistics: a distance profile needs the layer's queries and keys, found none")
        sequences = output.query.shape[0]
        profile, received = attention_sums(
            output.query,
            output.key,
            output.scale,
            window=output.window,
            causal=output.causal,
            softcap=output.softcap,
            sinks=output.sinks,
        )
        weighted = profile.double() * sequences
        self._profile = weighted if self._profile is None else self._profile + weighted
        self._sequences += sequences
        if self._received is None:
            self._received = _Moments.zeros(inputs)
        self._received.add(inputs, received.flatten())
        return received.flatten()


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


@dataclass
class _NormedMoments:
    """Sums of ``n x~^T [H + G, D, E+1]``, of that by received attention, and of ``divisors [H + G, 3]``.

    ``tokens []`` and ``weight []`` are what they are divided by.
    """

    cross: Tensor
    received: Tensor
    divisors: Tensor
    tokens: Tensor
    weight: Tensor

    @staticmethod
    def zeros(normed: Tensor, inputs: Tensor) -> "_NormedMoments":
        """Of ``normed [N, H + G, D]`` and ``inputs [N, E]`` to come."""
        cross = inputs.new_zeros(*normed.shape[1:], inputs.shape[1] + 1)
        none = inputs.new_zeros(())
        return _NormedMoments(cross, torch.zeros_like(cross), inputs.new_zeros(normed.shape[1], 3), none, none.clone())

    def add(self, normed: Tensor, divisors: Tensor, inputs: Tensor, received: Tensor | None) -> None:
        rows, inputs = normed.flatten(1), torch.nn.functional.pad(inputs, (0, 1), value=1.0)
        self.cross.flatten(0, 1).addmm_(rows.mT, inputs)
        self.divisors.add_(torch.stack([divisors, divisors.square(), normed.square().sum(-1)], -1).sum(0))
        self.tokens += len(rows)
        if received is not None:
            self.received.flatten(0, 1).addmm_((rows * received[:, None].to(rows)).mT, inputs)
            self.weight += received.double().sum()

    def into(self, statistics: LayerStatistics) -> LayerStatistics:
        """``statistics`` with the averages."""
        return replace(
            statistics,
            normed=self.cross / self.tokens,
            received_normed=self.received / self.weight if self.weight else None,
            divisors=self.divisors / self.tokens,
        )


def add_gram(gram: Tensor, inputs: Tensor) -> None:
    """Add ``inputs^T inputs``, ``inputs [N, E]``, to the blocks on and above the diagonal of ``gram [E, E]``."""
    width = gram.shape[0]
    edges = [round(width * block / _GRAM_BLOCKS) for block in range(_GRAM_BLOCKS + 1)]
    for start, stop in pairwise(edges):
        gram[start:stop, start:].addmm_(inputs[:, start:stop].T, inputs[:, start:])


@dataclass(frozen=True)
class SourceHeads:
    """The attention of one layer of the source, from its files; ``scale`` multiplies q . k, ``clip`` bounds both."""

    weights: AttentionWeights
    rotary: Rotary
    scale: float
    clip: float | None = None


ReadHeads = Callable[[int], SourceHeads]


def with_heads(output: LayerOutput, heads: SourceHeads, arguments: Arguments) -> LayerOutput:
    """``output`` with queries and keys, if it has none; ``arguments`` are those of its layer.

    ALiBi becomes one more dim of both: up to a constant of each query, the bias of head ``h`` and position ``j`` is
    ``slope_h j``.
    """
    if output.query is not None:
        return output
    weights, length = heads.weights, output.attention_input.shape[1]
    tables = rotary_tables(torch.arange(length), heads.rotary.theta)
    query, key = (
        _side(output.attention_input, weight, bias, heads, tables)
        for weight, bias in ((weights.q, weights.q_bias), (weights.k, weights.k_bias))
    )
    slopes = _slopes(arguments, weights.heads)
    if slopes is not None:
        per_score = (slopes.to(query) / heads.scale)[:, None, None].expand(*query.shape[:3], 1)
        places = torch.arange(length).to(key)[:, None].expand(*key.shape[:3], 1)
        query, key = torch.cat([query, per_score], -1), torch.cat([key, places], -1)
    return replace(output, query=query, key=key, scale=heads.scale)


def _side(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, heads: SourceHeads, tables: tuple[Tensor, Tensor]
) -> Tensor:
    rows = torch.einsum("bte,hde->bhtd", inputs, weight.to(inputs))
    rows = rows if bias is None else rows + bias.to(rows)[:, None]
    rows = rows if heads.clip is None else rows.clamp(-heads.clip, heads.clip)
    cos, sin = (heads.rotary.amplitude * table.to(rows.device) for table in tables)
    return apply_rotary(rows, (cos, sin)) if heads.rotary.dims else rows


def _slopes(arguments: Arguments, heads: int) -> Tensor | None:
    """The slope of each head ``[H]`` of the biases ``[..., positions]`` that a layer is given; None without."""
    given = arguments.kwargs.get("alibi", arguments.kwargs.get("position_bias"))
    if given is None:
        return None
    rows: Tensor = given.reshape(-1, given.shape[-1])[:heads]
    return rows[:, -1] - rows[:, -2]
