"""``principal``: folds the key/value heads of each group into the best shared head, not the average one.

The queries and the output projection absorb what the fold does to keys and values, so the result has the same
architecture as mean pooling gives (Ainslie et al., 2023, arXiv:2305.13245) and loses far less. A group of one is kept
bit for bit; identical heads fold exactly; a rotation of value heads or phases of key pairs that the output projection
and the queries undo changes nothing. Norms between projection and rotary embedding (see `normed`) cost exactness.

Sources may be multi-head or grouped already: the queries of all heads that read a KV head weigh together.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms import normed
from kvfold.convert.transforms.linalg import head_moments, input_moment, with_bias
from kvfold.convert.transforms.principal_keys import share_keys
from kvfold.convert.transforms.principal_values import fold_constants, output_metric, share_values
from kvfold.convert.transforms.score_fit import fit_scores, pair_basis, turning
from kvfold.convert.transforms.shared_head import SharedHead, balance
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary

Groups = Sequence[Sequence[int]]


CONTEXT = 4096


def fold(
    weights: AttentionWeights, statistics: LayerStatistics, rotary: Rotary, groups: Groups, context: int = CONTEXT
) -> AttentionWeights:
    """Folds the ``G`` KV heads to ``len(groups)``; ``groups[i]`` lists the source heads of new head ``i``.

    Query heads (and with them the columns of ``o``) are reordered so that query head ``h`` again reads KV head
    ``h // (H // len(groups))``. Computed in float64, returned in float32 on the device of ``weights``. ``context`` is
    how many positions the result has to serve (the model's limit, or the layer's window): keys are fitted for all
    distances below it, also those that the calibration text was too short for.
    Raises ValueError when ``groups`` is not a partition of the KV heads into equal parts.
    """
    check_partition(groups, weights.kv_heads)
    source = ordered(weights, groups)
    moment = input_moment(statistics).to(weights.q.device)
    size = len(groups[0])
    if size == 1:
        return in_float32(source)
    parts = [range(start, start + size) for start in range(0, weights.kv_heads, size)]
    profile = statistics.profile.to(weights.q.device)[query_order(groups, weights.heads // weights.kv_heads)]
    folded = fold_keys(source, moment, rotary, parts, turning(profile, context, rotary, weights.head_dim))
    return in_float32(fold_values(source, folded, moment, parts))


def fold_keys(
    weights: AttentionWeights, moment: Tensor, rotary: Rotary, parts: Sequence[range], turn: Tensor
) -> AttentionWeights:
    """Shared keys for consecutive ``parts`` of the KV heads, the queries that fit them, and their norms.

    ``turn [H, D, D]``: the distances that count for each query head, from `turning`.
    """
    keys = normed.linearise(with_bias(weights.k, weights.k_bias), weights.k_norm, moment)
    queries = normed.linearise(with_bias(weights.q, weights.q_bias), weights.q_norm, moment)
    heads = key_heads(keys.affine, queries.affine, moment, rotary, parts, turn)
    new_keys = keys.map(lambda rows: torch.stack([h.merge(rows[list(p)]) for h, p in zip(heads, parts, strict=True)]))
    decode = torch.cat([h.decode for h in heads])  # [H, D, D]
    new_queries = queries.map(lambda rows: decode.mT @ rows)
    blocks = pair_blocks(rotary, weights.head_dim)
    k, k_norm, q, q_norm = normed.restore(keys, queries, new_keys, new_queries, blocks, moment)
    return replace(
        weights,
        q=q[..., :-1],
        k=k[..., :-1],
        q_bias=None if weights.q_bias is None else q[..., -1],
        k_bias=None if weights.k_bias is None else k[..., -1],
        q_norm=q_norm,
        k_norm=k_norm,
    )


def key_heads(
    keys: Tensor, queries: Tensor, moment: Tensor, rotary: Rotary, parts: Sequence[range], turn: Tensor
) -> list[SharedHead]:
    """The shared key head of every part, from rows ``keys [G, D, F]`` and ``queries [H, D, F]``.

    ``decode`` has one map per query head: heads that read the same key attend over different distances.
    """
    dims, repeat = keys.shape[1], len(queries) // len(keys)
    basis = pair_basis(rotary, dims).to(keys.device)
    blocks = pair_blocks(rotary, dims)
    scale = keys.new_ones(dims)
    scale[: rotary.dims] = rotary.amplitude
    asked = scale[:, None] * head_moments(queries, moment) * scale  # [H, D, D]
    projected = keys @ moment
    heads = []
    for part in parts:
        members, readers = slice(part.start, part.stop), slice(part.start * repeat, part.stop * repeat)
        joint = torch.einsum("iaf,jbf->iajb", projected[members], keys[members])
        joint = joint * scale[:, None, None] * scale
        weight = torch.unflatten(asked[readers], 0, (len(part), repeat)).sum(1)
        shared = share_keys(joint, weight, rotary.dims // 2).repeat_decode(repeat)
        if rotary.dims:
            shared = fit_scores(shared, joint, asked[readers], turn[readers], basis)
        heads.append(balance(shared.in_units(scale), keys[members], blocks))
    return heads


def fold_values(
    source: AttentionWeights, folded: AttentionWeights, moment: Tensor, parts: Sequence[Sequence[int]]
) -> AttentionWeights:
    """``folded`` (the source with its keys folded) with shared values and the output projection and biases that fit."""
    values = with_bias(source.v, source.v_bias)
    heads = value_heads(values, source.o, moment, parts, constants=source.o_bias is None)
    merged = torch.stack([h.merge(values[list(p)]) for h, p in zip(heads, parts, strict=True)])
    repeat = source.heads // source.kv_heads
    decode = torch.cat([h.repeat_decode(repeat).decode for h in heads])  # [H, D, D]
    folded = replace(
        folded,
        v=merged[..., :-1],
        o=torch.einsum("ehd,hdc->ehc", source.o.double(), decode),
        v_bias=None if source.v_bias is None else merged[..., -1],
    )
    return fold_constants(source, folded, moment[-1, :-1])


def value_heads(
    values: Tensor, output: Tensor, moment: Tensor, parts: Sequence[Sequence[int]], constants: bool
) -> list[SharedHead]:
    """The shared value head of every part, from rows ``values [G, D, F]`` and ``W_o [E, H, D]``.

    ``constants``: the values' bias has to fit through the shared head (there is no output bias to take it).
    """
    metric = output_metric(output, values.shape[0])
    if not constants:
        values = torch.cat((values[..., :-1], torch.zeros_like(values[..., -1:])), -1)
    projected = values @ moment
    dims = torch.arange(values.shape[1], device=values.device)
    heads = []
    for part in parts:
        index = list(part)
        joint = torch.einsum("iaf,jbf->iajb", projected[index], values[index])
        heads.append(balance(share_values(joint, metric[index]), values[index], [dims]))
    return heads


def pair_blocks(rotary: Rotary, dims: int) -> list[Tensor]:
    """The dims within which a key head may be rescaled: each rotary pair, and the unrotated dims together."""
    pairs = rotary.dims // 2
    device = rotary.theta.device
    blocks = [torch.tensor([pair, pair + pairs], device=device) for pair in range(pairs)]
    rest = torch.arange(rotary.dims, dims, device=device)
    return [*blocks, rest] if rest.numel() else blocks


def ordered(weights: AttentionWeights, groups: Groups) -> AttentionWeights:
    """The same layer with its heads relabelled so that each group's heads stand together."""
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
        q_norm=normed.select(weights.q_norm, q),
        k_norm=normed.select(weights.k_norm, kv),
    )


def query_order(groups: Groups, repeat: int) -> list[int]:
    """The query heads in the order of the KV heads that they read, ``repeat`` for each."""
    return [head * repeat + i for group in groups for head in group for i in range(repeat)]


def in_float32(weights: AttentionWeights) -> AttentionWeights:
    """Every tensor of the layer as float32."""

    def cast(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.float()

    return replace(
        weights,
        q=weights.q.float(),
        k=weights.k.float(),
        v=weights.v.float(),
        o=weights.o.float(),
        q_bias=cast(weights.q_bias),
        k_bias=cast(weights.k_bias),
        v_bias=cast(weights.v_bias),
        o_bias=cast(weights.o_bias),
        q_norm=normed.in_float32(weights.q_norm),
        k_norm=normed.in_float32(weights.k_norm),
    )


def check_partition(groups: Groups, kv_heads: int) -> None:
    """Raises ValueError unless ``groups`` splits ``range(kv_heads)`` into parts of one size."""
    members = sorted(head for group in groups for head in group)
    if members != list(range(kv_heads)) or len({len(group) for group in groups}) != 1:
        raise ValueError(
            f"groups: expected each of {kv_heads} KV heads once, in groups of one size, "
            f"found {[list(group) for group in groups]}"
        )
