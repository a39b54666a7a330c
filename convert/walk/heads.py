"""Queries and keys of attention that does not show them: from its inputs and the layer's weights.

Where a stock class does not call transformers' attention functions (bloom, falcon, gptj, mpt), nothing records them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.attention.drift.frame import Arguments
from kvfold.attention.drift.streams import LayerOutput
from kvfold.attention.rotary import apply_rotary, rotary_tables
from kvfold.convert.transforms.weights import AttentionWeights, Rotary


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
