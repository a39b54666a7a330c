"""The ``principal`` fold: replaces the key/value heads of each group by the best shared head
instead of their average.

Queries and the output projection absorb the effect of the fold on keys and values, so the result
has the same architecture as with mean pooling (Ainslie et al., 2023, arXiv:2305.13245) and loses
far less. A group of one head is kept bit for bit, and identical heads fold exactly. Rotating value
heads, or the phases of key pairs, changes nothing if the output projection and the queries undo it.
Norms between projection and rotary embedding (see `normed`) make the fold inexact.

Sources may be multi-head or already grouped: the queries of all heads that read a KV head are
combined.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.transforms.fold.heads import GroupMoments, Objective, SharedHead
from kvfold.convert.transforms.fold.normed import restore
from kvfold.convert.transforms.fold.score_fit import SCORES, distance_moments
from kvfold.convert.transforms.head_norms import LinearizedNorm, linearize, linearize_heads
from kvfold.convert.transforms.linalg import (
    append_bias,
    head_moments,
    input_moment,
    joint_moment,
    output_metric,
    split_bias,
)
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary

Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class LayerMoments:
    """A layer and its second moments: float64, heads in the source's order, independent of the
    partition of the heads.

    weights, rotary: the layer
    moment: ``[F, F]`` of the inputs with a constant 1 appended (``F = E + 1``)
    keys, queries: the average linear maps of the projections and their norms
    values: ``[G, D, F]``
    joint_keys, joint_values: ``[G, D, G, D]``, second moments between all heads
    query_moments: ``[H, D, D]``, the second moment of each head's queries
    phi: ``[H, D, D]``, average rotations from `distance_moments`
    metric: ``[G, D, D]`` from `output_metric`
    amplitude: ``[D]``, the rotary amplitude; included in ``joint_keys`` and ``query_moments`` only
    """

    weights: AttentionWeights
    rotary: Rotary
    moment: Tensor
    keys: LinearizedNorm
    queries: LinearizedNorm
    values: Tensor
    joint_keys: Tensor
    joint_values: Tensor
    query_moments: Tensor
    phi: Tensor
    metric: Tensor
    amplitude: Tensor

    def group(self, members: Sequence[int] | Tensor) -> GroupMoments:
        """The moments of the KV heads ``members [m]`` and of the queries that read them."""
        repeat = self.weights.heads // self.weights.kv_heads
        device = self.moment.device
        chosen = torch.as_tensor(members, device=device)
        readers = (chosen[:, None] * repeat + torch.arange(repeat, device=device)).flatten()
        return GroupMoments(
            keys=self.joint_keys[chosen][:, :, chosen],
            queries=self.query_moments[readers],
            values=self.joint_values[chosen][:, :, chosen],
            phi=self.phi[readers],
            metric=self.metric[chosen],
            pairs=self.rotary.dims // 2,
        )


def layer_moments(
    weights: AttentionWeights, statistics: LayerStatistics, rotary: Rotary, context: int = 0
) -> LayerMoments:
    """All moments, computed on the device of ``weights``.

    Keys are fitted for all distances below ``context``, the number of positions to support (the
    model's limit, or the layer's window); 0 means the length of the calibration text.
    """
    statistics = statistics.to(weights.q.device)
    moment = input_moment(statistics)
    keys = linearize(append_bias(weights.k, weights.k_bias), weights.k_norm, moment)
    if weights.k_norm is not None and weights.k_norm.bias is None and statistics.normed is not None:
        # If the members' keys are divided before the fold, the shared head's norm has less left to
        # divide.
        fitted = linearize_heads(weights, statistics)
        keys = replace(keys, rows=append_bias(fitted.k, fitted.k_bias))
    queries = linearize(append_bias(weights.q, weights.q_bias), weights.q_norm, moment)
    amplitude = moment.new_ones(weights.head_dim)
    amplitude[: rotary.dims] = rotary.amplitude
    # Without an output bias, the values' bias is part of the fit (_fold_constants).
    values = append_bias(weights.v, None if weights.o_bias is not None else weights.v_bias)
    return LayerMoments(
        weights=weights,
        rotary=rotary,
        moment=moment,
        keys=keys,
        queries=queries,
        values=values,
        joint_keys=joint_moment(amplitude[:, None] * keys.affine, moment),
        joint_values=joint_moment(values, moment),
        query_moments=head_moments(amplitude[:, None] * queries.affine, moment),
        phi=distance_moments(statistics.profile, context, rotary, weights.head_dim),
        metric=output_metric(weights.o, weights.kv_heads),
        amplitude=amplitude,
    )


def fold(layer: LayerMoments, groups: Groups, objective: Objective = SCORES) -> AttentionWeights:
    """Fold the ``G`` KV heads to ``len(groups)``; ``groups[i]`` lists the source heads that new
    head ``i`` replaces. All groups have the same size and contain each head once.

    Query heads (and with them the columns of ``o``) are reordered so that query head ``h`` again
    reads KV head ``h // (H // len(groups))``. Computed in float64, returned in float32 on the
    device of the weights.
    """
    source = order_heads(layer.weights, groups)
    repeat = layer.weights.heads // layer.weights.kv_heads
    if len(groups[0]) == 1:
        return source.map(Tensor.float)
    members = [layer.group(group) for group in groups]
    key_heads = [objective.key_head(moments) for moments in members]
    value_heads = [objective.value_head(moments).repeat_decode(repeat) for moments in members]
    folded = _fold_keys(layer, groups, source, key_heads)
    return _fold_values(layer, groups, folded, value_heads).map(Tensor.float)


def _fold_keys(
    layer: LayerMoments, groups: Groups, source: AttentionWeights, heads: Sequence[SharedHead]
) -> AttentionWeights:
    """Replace the keys, queries and norms of ``source`` (ordered by groups) by those for the shared
    ``heads``.
    """
    dims = source.head_dim
    device = source.q.device
    pairs = layer.rotary.dims // 2
    rest = torch.arange(layer.rotary.dims, dims, device=device)
    # Sets of dims that share one scale factor: each rotary pair, and all unrotated dims together.
    blocks = [*torch.arange(2 * pairs, device=device).view(2, pairs).mT]
    if rest.numel():
        blocks.append(rest)
    kv = query_order(groups, 1)
    readers = query_order(groups, source.heads // source.kv_heads)
    keys = layer.keys.map(lambda part: part[kv])
    queries = layer.queries.map(lambda part: part[readers])
    # The moments of keys and queries include the rotary amplitude, but these rows do not.
    change = layer.amplitude / layer.amplitude[:, None]
    heads = [SharedHead(head.encode * change, head.decode / change) for head in heads]
    encode, decode = _balanced(heads, keys.affine, blocks)
    (k, k_norm), (q, q_norm) = restore(keys, queries, encode, decode, blocks, layer.moment)
    q, q_bias = split_bias(q, source.q_bias is not None)
    k, k_bias = split_bias(k, source.k_bias is not None)
    return replace(source, q=q, k=k, q_bias=q_bias, k_bias=k_bias, q_norm=q_norm, k_norm=k_norm)


def _fold_values(
    layer: LayerMoments, groups: Groups, source: AttentionWeights, heads: Sequence[SharedHead]
) -> AttentionWeights:
    """Replace the values, output projection and biases of ``source`` (ordered by groups) for the
    shared ``heads``.
    """
    dims = [torch.arange(source.head_dim, device=source.v.device)]
    encode, decode = _balanced(heads, layer.values[query_order(groups, 1)], dims)
    members = torch.unflatten(append_bias(source.v, source.v_bias), 0, (len(groups), -1))
    v, v_bias = split_bias(
        torch.einsum("gmab,gmbf->gaf", encode, members), source.v_bias is not None
    )
    folded = replace(
        source, v=v, v_bias=v_bias, o=torch.einsum("ehd,hdc->ehc", source.o.double(), decode)
    )
    return _fold_constants(source, folded, layer.moment[-1, :-1])


def _balanced(
    heads: Sequence[SharedHead], members: Tensor, blocks: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """``encode [g, m, D, D]``, ``decode [H, D, D]`` of all groups; shared rows get their members'
    mean norm.
    """
    encode = torch.stack([head.encode for head in heads])
    decode = torch.stack([head.decode for head in heads])
    members = torch.unflatten(members, 0, (len(heads), -1))
    merged = torch.einsum("gmab,gmbf->gaf", encode, members)
    factor = torch.ones_like(merged[..., 0])
    # The dims of a block (a rotary pair, the unrotated dims, a whole value head) share one factor.
    for block in blocks:
        before = members[:, :, block].flatten(2).norm(dim=2).mean(1)
        after = merged[:, block].flatten(1).norm(dim=1)
        # Leave all-zero rows unchanged.
        factor[:, block] = torch.where((before > 0) & (after > 0), before / after, 1.0)[:, None]
    return factor[:, None, :, None] * encode, (decode / factor[:, None, None]).flatten(0, 1)


def _fold_constants(
    source: AttentionWeights, folded: AttentionWeights, mean: Tensor
) -> AttentionWeights:
    """``folded`` with its biases adjusted to the changed constant part of the values, if values
    have a bias.
    """
    # Attention rows sum to 1, so a constant passes through attention unchanged. With sinks they sum
    # to less; biases then stay as fitted with the values.
    if source.v_bias is None or source.sinks is not None:
        return folded

    def output(weights: AttentionWeights, values: Tensor) -> Tensor:
        spread = values.repeat_interleave(weights.heads // len(values), 0)
        return torch.einsum("ehd,hd->e", weights.o.double(), spread)

    if source.o_bias is not None and folded.v_bias is not None:
        # The output bias absorbs the values' bias exactly, which so far passed through the old
        # output projection.
        moved = output(source, source.v_bias.double()) - output(folded, folded.v_bias)
        return replace(folded, o_bias=source.o_bias.double() + moved)
    # Without an output bias, fit the values' bias by least squares to keep the output at the mean
    # input unchanged.
    missing = output(source, source.v.double() @ mean + source.v_bias.double())
    missing = missing - output(folded, folded.v @ mean)
    columns = torch.unflatten(folded.o, 1, (folded.kv_heads, -1)).sum(2).flatten(1)  # [E, g * D]
    v_bias = torch.linalg.pinv(columns, rtol=1e-9) @ missing
    return replace(folded, v_bias=v_bias.reshape(folded.kv_heads, -1))


def order_heads(weights: AttentionWeights, groups: Groups) -> AttentionWeights:
    """The same layer with its heads reordered so that the heads of each group are adjacent."""
    device = weights.q.device
    kv = torch.tensor(query_order(groups, 1), device=device)
    q = torch.tensor(query_order(groups, weights.heads // weights.kv_heads), device=device)
    fields = {"q": q, "q_bias": q, "sinks": q, "k": kv, "v": kv, "k_bias": kv, "v_bias": kv}
    changes: dict[str, Any] = {"o": weights.o[:, q]}
    for name, order in fields.items():
        rows = getattr(weights, name)
        changes[name] = None if rows is None else rows[order]
    if weights.q_norm is not None:
        changes["q_norm"] = weights.q_norm.map(lambda rows: rows[q])
    if weights.k_norm is not None:
        changes["k_norm"] = weights.k_norm.map(lambda rows: rows[kv])
    return replace(weights, **changes)


def query_order(groups: Groups, repeat: int) -> list[int]:
    """The query heads in the order of the KV heads that they read, ``repeat`` query heads for each
    KV head.
    """
    return [head * repeat + i for group in groups for head in group for i in range(repeat)]
