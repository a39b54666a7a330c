"""``principal``: folds the key/value heads of each group into the best shared head, not the average one.

The queries and the output projection absorb what the fold does to keys and values, so the result has the same
architecture as mean pooling gives (Ainslie et al., 2023, arXiv:2305.13245) and loses far less. A group of one is kept
bit for bit; identical heads fold exactly; a rotation of value heads or phases of key pairs that the output projection
and the queries undo changes nothing. Norms between projection and rotary embedding (see `normed`) cost exactness.

Sources may be multi-head or grouped already: the queries of all heads that read a KV head weigh together.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms.fold import normed
from kvfold.convert.transforms.fold.heads import Objective, SharedHead, balance, fold_constants
from kvfold.convert.transforms.fold.moments import LayerMoments, layer_moments
from kvfold.convert.transforms.fold.score_fit import SCORES
from kvfold.convert.transforms.linalg import with_bias
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary

Groups = Sequence[Sequence[int]]


def fold(
    weights: AttentionWeights,
    statistics: LayerStatistics,
    rotary: Rotary,
    groups: Groups,
    context: int = 0,
    objective: Objective = SCORES,
) -> AttentionWeights:
    """Folds the ``G`` KV heads to ``len(groups)``; ``groups[i]`` lists the source heads of new head ``i``.

    Query heads (and with them the columns of ``o``) are reordered so that query head ``h`` again reads KV head
    ``h // (H // len(groups))``. Computed in float64, returned in float32 on the device of ``weights``. ``context`` is
    how many positions the result has to serve (the model's limit, or the layer's window): keys are fitted for all
    distances below it, also those that the calibration text was too short for; 0 stands for the text's own length.
    ``objective``: the error that the shared heads minimize.
    Raises ValueError when ``groups`` is not a partition of the KV heads into equal parts.
    """
    check_partition(groups, weights.kv_heads)
    if len(groups[0]) == 1:
        return ordered(weights, groups).map(Tensor.float)
    return fold_moments(layer_moments(weights, statistics, rotary, context), groups, objective)


def fold_moments(layer: LayerMoments, groups: Groups, objective: Objective = SCORES) -> AttentionWeights:
    """As `fold`, from moments computed before: for trying several partitions of one layer."""
    check_partition(groups, layer.weights.kv_heads)
    source = ordered(layer.weights, groups)
    if len(groups[0]) == 1:
        return source.map(Tensor.float)
    folded = _fold_keys(layer, groups, source, objective)
    return _fold_values(layer, groups, source, folded, objective).map(Tensor.float)


def _fold_keys(layer: LayerMoments, groups: Groups, source: AttentionWeights, objective: Objective) -> AttentionWeights:
    """``source``, heads ordered by groups, with shared keys, the queries that fit them, and their norms."""
    heads = [key_head(layer, group, objective) for group in groups]
    decode = torch.cat([head.decode for head in heads])  # [H, D, D]
    keys = layer.keys.select([head for group in groups for head in group])
    queries = layer.queries.select([head for group in groups for head in layer.query_heads(group)])
    merge = _merging(heads, len(groups[0]))
    k, q = normed.restore(
        keys,
        queries,
        keys.map(merge),
        queries.map(lambda rows: decode.mT @ rows),
        pair_blocks(layer.rotary, source.head_dim),
        layer.moment,
    )
    return replace(
        source,
        q=q.rows[..., :-1],
        k=k.rows[..., :-1],
        q_bias=None if source.q_bias is None else q.rows[..., -1],
        k_bias=None if source.k_bias is None else k.rows[..., -1],
        q_norm=q.norm,
        k_norm=k.norm,
    )


def key_head(layer: LayerMoments, group: Sequence[int], objective: Objective = SCORES) -> SharedHead:
    """The shared key head of a group, with a ``decode`` per query head: each attends over distances of its own."""
    members = list(group)
    shared = objective.key_head(layer.group(members))
    blocks = pair_blocks(layer.rotary, layer.weights.head_dim)
    return balance(shared.without(layer.amplitude), layer.keys.affine[members], blocks)


def _fold_values(
    layer: LayerMoments, groups: Groups, source: AttentionWeights, folded: AttentionWeights, objective: Objective
) -> AttentionWeights:
    """``folded`` (its keys are) with shared values and the output projection and biases that fit them."""
    heads = [value_head(layer, group, objective) for group in groups]
    members = with_bias(source.v, source.v_bias)
    merged = _merging(heads, len(groups[0]))(members)
    decode = torch.cat([head.repeat_decode(layer.repeat).decode for head in heads])  # [H, D, D]
    folded = replace(
        folded,
        v=merged[..., :-1],
        o=torch.einsum("ehd,hdc->ehc", source.o.double(), decode),
        v_bias=None if source.v_bias is None else merged[..., -1],
    )
    return fold_constants(source, folded, layer.moment[-1, :-1])


def value_head(layer: LayerMoments, group: Sequence[int], objective: Objective = SCORES) -> SharedHead:
    """The shared value head of a group."""
    members = list(group)
    dims = torch.arange(layer.values.shape[1], device=layer.values.device)
    return balance(objective.value_head(layer.group(members)), layer.values[members], [dims])


def _merging(heads: list[SharedHead], size: int) -> Callable[[Tensor], Tensor]:
    """Rows ``[G, D, F]``, ordered by groups, to rows of the shared heads ``[g, D, F]``."""

    def merge(rows: Tensor) -> Tensor:
        return torch.stack([head.merge(part) for head, part in zip(heads, torch.split(rows, size), strict=True)])

    return merge


def pair_blocks(rotary: Rotary, dims: int) -> list[Tensor]:
    """The dims within which a key head may be rescaled: each rotary pair, and the unrotated dims together."""
    pairs = rotary.dims // 2
    device = rotary.theta.device
    blocks = [torch.tensor([pair, pair + pairs], device=device) for pair in range(pairs)]
    rest = torch.arange(rotary.dims, dims, device=device)
    return [*blocks, rest] if rest.numel() else blocks


def ordered(weights: AttentionWeights, groups: Groups) -> AttentionWeights:
    """The same layer with its heads relabeled so that each group's heads stand together."""
    kv = [head for group in groups for head in group]
    q = query_order(groups, weights.heads // weights.kv_heads)

    def rows(tensor: Tensor | None, index: list[int]) -> Tensor | None:
        return None if tensor is None else tensor[index]

    return replace(
        weights,
        q=weights.q[q],
        k=weights.k[kv],
        v=weights.v[kv],
        o=weights.o[:, q],
        q_bias=rows(weights.q_bias, q),
        k_bias=rows(weights.k_bias, kv),
        v_bias=rows(weights.v_bias, kv),
        q_norm=None if weights.q_norm is None else weights.q_norm.map(lambda row: row[q]),
        k_norm=None if weights.k_norm is None else weights.k_norm.map(lambda row: row[kv]),
        sinks=rows(weights.sinks, q),
    )


def query_order(groups: Groups, repeat: int) -> list[int]:
    """The query heads in the order of the KV heads that they read, ``repeat`` for each."""
    return [head * repeat + i for group in groups for head in group for i in range(repeat)]


def check_partition(groups: Groups, kv_heads: int) -> None:
    """Raises ValueError unless ``groups`` splits ``range(kv_heads)`` into parts of one size."""
    members = sorted(head for group in groups for head in group)
    if members != list(range(kv_heads)) or len({len(group) for group in groups}) != 1:
        raise ValueError(
            f"groups: expected each of {kv_heads} KV heads once, in groups of one size, "
            f"found {[list(group) for group in groups]}"
        )
