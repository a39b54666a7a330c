"""A layer rescaled so that its inputs, queries, keys, values and outputs are near one, without rounding.

Fits square their inputs and compare them with constants (the 1 that multiplies a bias). In float64 that works for
ordinary layers and fails for finite ones whose weights are 1e15 times larger or smaller. Powers of two round nothing.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics

_LARGEST_SCORES = 2.0**16  # errors of scores and of values are added up as squares, with 53 bits between them


@dataclass(frozen=True)
class Units:
    """The sizes of inputs, queries, keys, values and outputs, as powers of two; 1 for what is zero."""

    inputs: float
    queries: float
    keys: float
    values: float
    outputs: float

    @property
    def scores(self) -> float:
        """The size of scores, bounded: far from one a softmax is saturated, or even, whatever their error."""
        return min(max(self.queries * self.keys, 1 / _LARGEST_SCORES), _LARGEST_SCORES)


PLAIN = Units(1.0, 1.0, 1.0, 1.0, 1.0)


def units_of(weights: AttentionWeights, statistics: LayerStatistics) -> Units:
    """The units of a layer: root mean squares, without biases."""

    def power_of_two(size: Tensor) -> float:
        value = float(size)
        return 2.0 ** round(math.log2(value)) if value > 0 else 1.0

    inputs = power_of_two(statistics.gram.diagonal().mean().clamp_min(0).sqrt())
    rows = (power_of_two(part.double().flatten(0, 1).norm(dim=-1).mean()) for part in (weights.q, weights.k, weights.v))
    queries, keys, values = (inputs * size for size in rows)
    return Units(inputs, queries, keys, values, power_of_two(weights.o.double().square().mean().sqrt()))


def in_units(
    weights: AttentionWeights, statistics: LayerStatistics, units: Units
) -> tuple[AttentionWeights, LayerStatistics]:
    """The layer and the moments of its inputs in ``units``; its scores are then in units too."""
    wide = weights.map(lambda tensor: tensor.to(torch.promote_types(tensor.dtype, torch.float32)))
    scaled = replace(
        wide,
        q=wide.q * (units.inputs / units.queries),
        k=wide.k * (units.inputs / units.keys),
        v=wide.v * (units.inputs / units.values),
        o=wide.o / units.outputs,
        q_bias=_over(wide.q_bias, units.queries),
        k_bias=_over(wide.k_bias, units.keys),
        v_bias=_over(wide.v_bias, units.values),
        o_bias=_over(_over(wide.o_bias, units.values), units.outputs),
    )
    gram, mean = statistics.gram.double(), statistics.mean.double()
    return scaled, replace(statistics, gram=gram / units.inputs / units.inputs, mean=mean / units.inputs)


def from_units(latent: LatentWeights, units: Units) -> LatentWeights:
    """A latent fitted to a layer `in_units`, as weights on the original inputs; the latent keeps its size."""
    rotary = units.queries * units.keys  # shared rotary keys have no unit: it is in the queries that read them
    return replace(
        latent,
        down=latent.down / units.inputs,
        rope_key=latent.rope_key / units.inputs,
        q_nope=latent.q_nope * (units.queries / units.inputs),
        q_rope=latent.q_rope * (rotary / units.inputs),
        uk=latent.uk * units.keys,
        uv=latent.uv * units.values,
        o=latent.o * units.outputs,
        q_nope_bias=_over(latent.q_nope_bias, 1 / units.queries),
        q_rope_bias=_over(latent.q_rope_bias, 1 / rotary),
        o_bias=_over(_over(latent.o_bias, 1 / units.values), 1 / units.outputs),
    )


def _over(bias: Tensor | None, unit: float) -> Tensor | None:
    return None if bias is None else bias / unit
