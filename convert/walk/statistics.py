"""Calibration statistics of a layer: Gram matrices and means of its attention inputs, and its
heads' profiles.

Some stock classes (bloom, falcon, gptj, mpt) do not call transformers' attention functions, so
their queries and keys cannot be recorded; `compute_queries_and_keys` computes them from the
attention inputs and the layer's weights.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.attention.drift.profile import sum_attention_by_distance_and_key
from kvfold.attention.drift.recording import LayerArguments, LayerOutput
from kvfold.attention.rotary import apply_rotary, rotary_tables
from kvfold.convert.families.layer_io import make_layer_rotary
from kvfold.convert.families.model import Model
from kvfold.convert.transforms.head_norms import has_norms, project_with_norms
from kvfold.convert.transforms.linalg import compute_upper_gram
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics


class StatisticsAccumulator:
    """Accumulates the calibration statistics of a layer, batch by batch, in float64.

    Pass the layer's ``weights`` for statistics of normalized queries and keys.
    """

    def __init__(self, weights: AttentionWeights | None = None) -> None:
        self._weights = weights if weights is not None and has_norms(weights) else None
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add_batch(self, output: LayerOutput) -> None:
        """Add a batch of sequences from the recorded ``output`` of the layer; the sequences of all
        batches must have the same length.
        """
        inputs = output.attention_input.flatten(0, -2).double()
        assert output.query is not None  # else `compute_queries_and_keys` gives both
        assert output.key is not None
        profile, received = sum_attention_by_distance_and_key(
            output.query,
            output.key,
            output.scale,
            window=output.window,
            softcap=output.softcap,
            sinks=output.sinks,
        )
        # All tokens alike, and by the attention that each received, on average over the heads.
        weights = {"": inputs.new_ones(len(inputs)), "received_": received.flatten()}
        sequences = len(output.query)
        sums = {"profile": profile * sequences, "sequences": profile.new_tensor(sequences)}
        for kind, weight in weights.items():
            sums[f"{kind}weight"] = weight.sum()
            sums[f"{kind}mean"] = weight @ inputs
            sums[f"{kind}gram"] = compute_upper_gram(inputs * weight.sqrt()[:, None])
        if self._weights is not None:
            normed, divisors = project_with_norms(self._weights, inputs)
            sums["divisors"] = torch.stack([divisors, divisors.square()], -1).sum(0)
            rows = torch.nn.functional.pad(inputs, (0, 1), value=1.0)
            for kind, weight in weights.items():
                cross = (normed.flatten(1) * weight[:, None]).mT @ rows
                sums[f"{kind}normed"] = cross.view(*normed.shape[1:], -1)
        for name, value in sums.items():
            self._sums[name] = self._sums[name].add_(value) if name in self._sums else value

    def average_batches(self) -> LayerStatistics:
        """Return the statistics averaged over the batches; there must be at least one."""
        sums = self._sums
        # Divide by the sum of weights: attention rows sum to 1 only in float32, and no covariance
        # may be negative.
        averages = {
            f"{kind}{name}": sums[f"{kind}{name}"] / sums[f"{kind}weight"]
            for kind in ("", "received_")
            for name in ("gram", "mean", "normed")
            if f"{kind}{name}" in sums
        }
        for name in ("gram", "received_gram"):
            averages[name] = averages[name].triu() + averages[name].triu(1).T
        if "divisors" in sums:
            averages["divisors"] = sums["divisors"] / sums["weight"]
        profile = sums["profile"] / sums["sequences"]
        return LayerStatistics(tokens=int(sums["weight"]), profile=profile, **averages)


def compute_queries_and_keys(
    output: LayerOutput,
    weights: AttentionWeights,
    model: Model,
    layer: int,
    arguments: LayerArguments,
) -> LayerOutput:
    """Return the recorded ``output`` with queries and keys computed from the layer's ``weights``,
    for stock classes whose own cannot be recorded.

    ALiBi becomes one extra dim of queries and keys: up to a constant per query, head ``h`` adds the
    bias ``slope_h j`` for position ``j``.
    """
    rotary = make_layer_rotary(model, layer)
    scale = model.layers[layer].scale
    clip = model.layers[layer].clip
    inputs = output.attention_input
    positions = torch.arange(inputs.shape[1])
    cos, sin = (
        rotary.amplitude * table.to(inputs.device)
        for table in rotary_tables(positions, rotary.theta)
    )
    sides = []
    for weight, bias in ((weights.q, weights.q_bias), (weights.k, weights.k_bias)):
        rows = torch.einsum("bte,hde->bhtd", inputs, weight.to(inputs))
        rows = rows if bias is None else rows + bias.to(rows)[:, None]
        rows = rows if clip is None else rows.clamp(-clip, clip)
        sides.append(apply_rotary(rows, (cos, sin)) if rotary.dims else rows)
    query, key = sides
    biases = arguments.kwargs.get("alibi", arguments.kwargs.get("position_bias"))
    if biases is not None:
        wide = torch.promote_types(query.dtype, torch.float32)
        rows = biases.reshape(-1, biases.shape[-1])[: weights.heads].to(wide)
        # A head's biases increase by its slope with each position; in 16 bits only the whole range
        # tells by how much.
        slope = (rows[:, -1] - rows[:, 0]) / max(1, rows.shape[1] - 1)
        # Falcon's biases [B, H, 1, S] are scaled with the scores, the others' are added to the
        # scaled scores.
        per_score = slope if biases.dim() == 4 else slope / scale
        query_dim = per_score[:, None, None].expand(*query.shape[:3], 1)
        key_dim = positions.to(query.device, wide)[:, None].expand(*key.shape[:3], 1)
        query = torch.cat([query.to(wide), query_dim], -1)
        key = torch.cat([key.to(wide), key_dim], -1)
    return replace(output, query=query, key=key, scale=scale)
