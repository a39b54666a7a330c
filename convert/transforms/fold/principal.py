"""The ``principal`` fold: replaces the key/value heads of each group by the best shared head
instead of their average.

Queries and the output projection absorb the effect of the fold on keys and values, so the result
has the same architecture as with mean pooling (Ainslie et al., 2023, arXiv:2305.13245) and loses
far less. A group of one head is kept bit for bit, and identical heads fold exactly. Rotating value
heads, or the phases of key pairs, changes nothing if the output projection and the queries undo it.

Sources may be multi-head or already grouped: the queries of all heads that read a KV head are
combined.

Norms between projection and rotary embedding (Qwen3, Gemma 3, OLMo 2, Cohere) make the fold
inexact. A norm divides by a number that depends on the token, so only a scale and signs pass
through it exactly:

    norm(W x) = gain * W x / rms(W x) + bias

The fold therefore uses the average linear map ``L = gain * W / rms(W)``, where ``rms(W)`` is the
root mean square over the calibration text (for keys, the least-squares map from `head_norms` if the
statistics contain it). It then writes the folded map ``L'`` as a projection in front of a norm of
the same kind and gain:

    W' = rms_source * L' / gain      so that      norm(W' x) = L' x / shortfall,   shortfall =
    rms(W') / rms_source

A norm on the queries compensates for their shortfall by its gain. The shortfall of a shared key is
compensated by the queries that read it.

Groups of one head and identical heads still fold exactly. All others are approximations:

* A shared key is divided by its own length, token by token, whereas each head was divided by its
  own. This costs most (four fifths of the error where norms were added to a trained model), and no
  choice of gains removes it. Keys from the least-squares map, whose heads are already divided,
  lose less: squared errors of the output of the four layers, 8 -> 2 heads, 0.058, 0.215, 0.165,
  0.195 and 0.048, 0.173, 0.093, 0.118 (the shipped model with norms added and then trained,
  measured by a script in git history). Queries from such a map lost more in three of four layers.
* Queries are mapped before their norm. A norm with one row per head preserves the sizes of the
  folded query's blocks, so lengths stay close to the source's; a single row for all heads contains
  the mean over heads.
* A layer norm removes the mean over the head's dims, which merging does not preserve. A norm bias
  that all heads share is the average of the biases that the heads need.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.transforms.fold.heads import (
    SCORES,
    GroupMoments,
    Objective,
    SharedHead,
    average_dim_rotations,
    merge_heads,
)
from kvfold.convert.transforms.head_norms import (
    LinearizedNorm,
    compute_divisors,
    linearize_norm,
    linearize_norms,
    subtract_mean,
)
from kvfold.convert.transforms.linalg import (
    append_bias,
    choose_moment_dtype,
    compute_covariance_root,
    compute_input_moment,
    compute_moments_between_heads,
    compute_output_metric,
    split_bias,
    whiten_inputs,
)
from kvfold.convert.transforms.weights import AttentionWeights, HeadNorm, LayerStatistics, Rotary

Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class LayerMoments:
    """An attention layer and the second moments of its inputs, queries, keys and values, in the
    dtype of its products (`linalg.choose_moment_dtype`); heads in the source's order.

    weights, rotary: the layer
    moment: ``[F, F]`` of the inputs with a constant 1 appended (``F = E + 1``)
    keys, queries: the average linear maps of the projections and their norms
    values: ``[G, D, F]``
    white_keys, white_values: ``[G, D, F]``, projections of whitened inputs
    query_moments: ``[H, D, D]``
    phi, metric: as in `GroupMoments`, of all heads
    """

    weights: AttentionWeights
    rotary: Rotary
    moment: Tensor
    keys: LinearizedNorm
    queries: LinearizedNorm
    values: Tensor
    white_keys: Tensor
    white_values: Tensor
    query_moments: Tensor
    phi: Tensor
    metric: Tensor

    def measure_heads(self, heads: Sequence[int]) -> GroupMoments:
        """Return the moments of the KV heads ``heads`` and of the query heads that read them."""
        repeat = self.weights.heads // self.weights.kv_heads
        chosen = list(heads)
        readers = [head * repeat + index for head in chosen for index in range(repeat)]
        return GroupMoments(
            keys=compute_moments_between_heads(self.white_keys[chosen]),
            queries=self.query_moments[readers],
            values=compute_moments_between_heads(self.white_values[chosen]),
            phi=self.phi[readers],
            metric=self.metric[chosen],
            pairs=self.rotary.dims // 2,
        )


def compute_layer_moments(
    weights: AttentionWeights, statistics: LayerStatistics, rotary: Rotary, context: int = 0
) -> LayerMoments:
    """Return the second moments of a layer's queries, keys and values from its calibration
    ``statistics``, on the device of ``weights``.

    Keys are fitted for all distances below ``context``, the number of positions to support (the
    model's limit, or the layer's window); 0 means the length of the calibration text.
    """
    moment = compute_input_moment(statistics)
    dtype = choose_moment_dtype(len(moment) - 1)
    root = compute_covariance_root(moment).to(dtype)
    moment = moment.to(dtype)
    keys = linearize_norm(append_bias(weights.k, weights.k_bias, dtype), weights.k_norm, moment)
    if weights.k_norm is not None and weights.k_norm.bias is None and statistics.normed is not None:
        # If the heads' keys are divided before the fold, the shared head's norm has less left to
        # divide.
        fitted = linearize_norms(weights, statistics)
        keys = replace(keys, rows=append_bias(fitted.k, fitted.k_bias, dtype))
    queries = linearize_norm(append_bias(weights.q, weights.q_bias, dtype), weights.q_norm, moment)

    def whiten(rows: Tensor) -> Tensor:
        """Return projections ``rows [n, D, F]`` on whitened inputs."""
        return whiten_inputs(rows, root, moment[-1], dtype)

    amplitudes = rotary.expand_amplitude(keys.rows)
    white_queries = whiten(queries.affine).mul_(amplitudes)
    # Without an output bias, the values' bias is part of the fit (_fold_value_biases).
    values = append_bias(weights.v, None if weights.o_bias is not None else weights.v_bias, dtype)
    phi = average_dim_rotations(statistics.profile, context, rotary, weights.head_dim)
    return LayerMoments(
        weights=weights,
        rotary=rotary,
        moment=moment,
        keys=keys,
        queries=queries,
        values=values,
        white_keys=whiten(keys.affine).mul_(amplitudes),
        white_values=whiten(values),
        query_moments=white_queries @ white_queries.mT,
        phi=phi.to(dtype.to_complex()),
        metric=compute_output_metric(weights.o.to(dtype), weights.kv_heads),
    )


def fold_heads(
    layer_moments: LayerMoments,
    groups: Groups,
    objective: Objective = SCORES,
    head_moments: GroupMoments | None = None,
) -> AttentionWeights:
    """Fold a layer's ``G`` KV heads to ``len(groups)`` shared heads; ``groups[i]`` lists the source
    heads that shared head ``i`` replaces, equally many in each group. ``head_moments`` are those of
    all heads, if they are known.

    Query heads (and with them the columns of ``o``) are reordered so that query head ``h`` again
    reads KV head ``h // (H // len(groups))``. Returned in float32 on the device of the weights.
    """
    kv = [head for group in groups for head in group]
    repeat = layer_moments.weights.heads // layer_moments.weights.kv_heads
    q = [head * repeat + index for head in kv for index in range(repeat)]
    source = reorder_heads(layer_moments.weights, q, kv)
    if len(groups[0]) == 1:
        return source.map_tensors(Tensor.float)
    ordered = replace(
        layer_moments,
        weights=source,
        keys=layer_moments.keys[kv],
        queries=layer_moments.queries[q],
        values=layer_moments.values[kv],
    )
    group_moments = [
        head_moments.select_heads(group) if head_moments else layer_moments.measure_heads(group)
        for group in groups
    ]
    folded = _fold_keys_and_queries(
        ordered, [objective.fit_key_head(group) for group in group_moments]
    )
    folded = _fold_values(
        ordered, folded, [objective.fit_value_head(group) for group in group_moments]
    )
    return folded.map_tensors(Tensor.float)


def _fold_keys_and_queries(
    layer_moments: LayerMoments, heads: Sequence[SharedHead]
) -> AttentionWeights:
    """Return the layer's weights with keys, queries and their norms folded onto the shared key
    ``heads``; the layer's heads are ordered by groups.
    """
    source = layer_moments.weights
    # The moments of keys and queries include the rotary amplitude, but these rows do not.
    amplitudes = layer_moments.rotary.expand_amplitude(layer_moments.keys.rows)
    change = amplitudes.mT / amplitudes
    heads = [SharedHead(head.encode * change, head.decode / change) for head in heads]
    # Each rotary pair may be rescaled, and all unrotated dims together.
    rotated = layer_moments.rotary.dims
    pair = torch.eye(rotated // 2, device=source.q.device).to(layer_moments.moment)
    still = source.head_dim - rotated
    blocks: Tensor = torch.block_diag(  # type: ignore[no-untyped-call]  # torch has no types here
        pair.repeat(2, 2), pair.new_ones(still, still)
    )
    encode, decode = _balance_row_norms(heads, layer_moments.keys.affine, blocks)
    (k, k_norm), (q, q_norm) = merge_key_and_query_heads(
        layer_moments.keys, layer_moments.queries, encode, decode, blocks, layer_moments.moment
    )
    q, q_bias = split_bias(q, source.q_bias is not None)
    k, k_bias = split_bias(k, source.k_bias is not None)
    return replace(source, q=q, k=k, q_bias=q_bias, k_bias=k_bias, q_norm=q_norm, k_norm=k_norm)


def merge_key_and_query_heads(
    keys: LinearizedNorm,
    queries: LinearizedNorm,
    encode: Tensor,
    decode: Tensor,
    blocks: Tensor,
    moment: Tensor,
) -> tuple[tuple[Tensor, HeadNorm | None], tuple[Tensor, HeadNorm | None]]:
    """Fold keys and queries; their norms, if any, are replaced by average linear maps, and the
    result is written as projections in front of norms of the same kinds.

    ``encode [g, m, D, D]`` merges the ``m`` heads of every shared key, ``decode [H, D, D]``
    changes the queries that read it; the heads of each group are adjacent. ``blocks [D, D]`` has
    ones where two dims may only be rescaled together (rotary pairs), else zeros. Returns the rows
    and norm of the keys, ``[g, D, F]``, then those of the queries, ``[H, D, F]``.
    """
    groups = len(encode)
    k = merge_heads(encode, keys.rows)
    k_norm = keys.norm
    if k_norm is not None:
        gain = torch.unflatten(keys.gain, 0, (groups, -1)).mean(1)
        rms = torch.unflatten(keys.divisor, 0, (groups, -1)).mean(1)
        k, shortfall = _solve_projection_and_shortfall(k, k_norm, gain, rms, moment)
        constant = merge_heads(encode, keys.constant[..., None])[..., 0]
        k_norm = _replace_norm_weights(k_norm, gain, constant / shortfall[:, None])
        # Queries that read a shared key compensate for its shortfall.
        decode = decode * shortfall.repeat_interleave(len(decode) // groups)[:, None, None]
    q = decode.mT @ queries.rows
    q_norm = queries.norm
    if q_norm is not None:
        before = ((queries.rows @ moment) * queries.rows).sum(-1) @ blocks
        after = ((q @ moment) * q).sum(-1) @ blocks
        sizes = torch.where((before > 0) & (after > 0), after / before, 1.0).sqrt()
        gain = queries.gain * _average_if_shared(sizes, q_norm)
        q, shortfall = _solve_projection_and_shortfall(q, q_norm, gain, queries.divisor, moment)
        constant = (decode.mT @ queries.constant[..., None])[..., 0]
        q_norm = _replace_norm_weights(
            q_norm, gain * _average_if_shared(shortfall, q_norm)[:, None], constant
        )
    return (k, k_norm), (q, q_norm)


def _solve_projection_and_shortfall(
    target: Tensor, norm: HeadNorm, gain: Tensor, rms: Tensor, moment: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the projection ``[n, D, F]`` that ``norm`` with ``gain [n, D]`` turns into ``target
    [n, D, F]`` up to a factor per head; and one over these factors, ``[n]``.
    """
    # A dim with gain 0 is dead, so its rows have no effect.
    inverse = torch.where(gain == 0, 0.0, 1 / gain)
    rows = target * inverse[..., None] * rms[:, None, None]
    return rows, compute_divisors(subtract_mean(rows, norm), norm, moment) / rms


def _average_if_shared(factors: Tensor, norm: HeadNorm) -> Tensor:
    """Return ``factors [n, ...]`` per head, or their geometric mean for every head if the norm
    stores one row for all heads.
    """
    if norm.shared and norm.extent == "head":
        return factors.log().mean(0, keepdim=True).exp().expand_as(factors)
    return factors


def _replace_norm_weights(norm: HeadNorm, gain: Tensor, constant: Tensor) -> HeadNorm:
    """Return ``norm`` with the gains and biases ``gain, constant [n, D]``, averaged over the heads
    if the norm stores one row for all heads.
    """
    if norm.shared:
        gain, constant = (rows.mean(0, keepdim=True).expand_as(rows) for rows in (gain, constant))
    bias = None if norm.bias is None else constant
    return replace(norm, weight=gain - norm.offset, bias=bias)


def _fold_values(
    layer_moments: LayerMoments, folded: AttentionWeights, heads: Sequence[SharedHead]
) -> AttentionWeights:
    """Return ``folded`` with values, output projection and biases folded onto the shared value
    ``heads``; so far these are those of ``layer_moments``.
    """
    source = layer_moments.weights
    blocks = layer_moments.values.new_ones(source.head_dim, source.head_dim)
    encode, decode = _balance_row_norms(heads, layer_moments.values, blocks)
    decode = decode.repeat_interleave(source.heads // source.kv_heads, 0)
    v = merge_heads(encode, layer_moments.values)[..., :-1]
    v_bias = source.v_bias
    if v_bias is not None:
        v_bias = merge_heads(encode, v_bias.to(v)[..., None])[..., 0]
    output = (source.o.to(decode).transpose(0, 1) @ decode).transpose(0, 1)
    folded = replace(folded, v=v, v_bias=v_bias, o=output)
    return _fold_value_biases(source, folded, layer_moments.moment[-1, :-1].double())


def _balance_row_norms(
    heads: Sequence[SharedHead], projections: Tensor, blocks: Tensor
) -> tuple[Tensor, Tensor]:
    """Return all groups' ``encode [g, m, D, D]`` and ``decode [n, D, D]`` (``g`` groups of ``m``
    heads, ``n`` maps back), scaled so that a shared head's rows have the mean norm of the rows
    ``projections [G, D, F]`` that it replaces.

    ``blocks [D, D]`` has ones where two dims are in one block, else zeros.
    """
    encode = torch.stack([head.encode for head in heads]).to(projections)
    decode = torch.stack([head.decode for head in heads]).to(projections)
    before = (_sum_row_squares(projections) @ blocks).sqrt()
    before = torch.unflatten(before, 0, encode.shape[:2]).mean(1)
    after = (_sum_row_squares(merge_heads(encode, projections)) @ blocks).sqrt()
    # Leave all-zero rows unchanged.
    factor = torch.where((before > 0) & (after > 0), before / after, 1.0)
    return factor[:, None, :, None] * encode, (decode / factor[:, None, None]).flatten(0, 1)


def _sum_row_squares(rows: Tensor) -> Tensor:
    """Return the squared norms ``[n, D]`` of ``rows [n, D, F]``, without a copy of their size."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms.square()


def _fold_value_biases(
    source: AttentionWeights, folded: AttentionWeights, mean: Tensor
) -> AttentionWeights:
    """Return ``folded`` with biases that keep the layer's output at the ``mean [E]`` input
    unchanged, if values have a bias.
    """
    # Attention rows sum to 1, so a constant passes through attention unchanged. With sinks they sum
    # to less; biases then stay as fitted with the values.
    if source.v_bias is None or folded.v_bias is None or source.sinks is not None:
        return folded
    # Output columns [E, G * D] for values that are the same at all tokens.
    before, after = (
        torch.unflatten(layer.o.double(), 1, (layer.kv_heads, -1)).sum(2).flatten(1)
        for layer in (source, folded)
    )
    v_bias = source.v_bias.double()
    if source.o_bias is not None:
        # The output bias absorbs the values' bias exactly, which so far passed through the old
        # output projection.
        moved = before @ v_bias.flatten() - after @ folded.v_bias.double().flatten()
        return replace(folded, o_bias=source.o_bias.double() + moved)
    # Without an output bias, fit the values' bias by least squares to keep the output at the mean
    # input unchanged.
    wanted = source.v.double() @ mean + v_bias
    missing = before @ wanted.flatten() - after @ (folded.v.double() @ mean).flatten()
    v_bias = torch.linalg.pinv(after, rtol=1e-9) @ missing
    return replace(folded, v_bias=v_bias.reshape(folded.kv_heads, -1))


def reorder_heads(
    weights: AttentionWeights, q_order: Sequence[int], kv_order: Sequence[int]
) -> AttentionWeights:
    """Return the same layer with query heads in the order ``q_order`` and key/value heads in the
    order ``kv_order``.
    """
    order = dict.fromkeys(("q", "q_bias", "q_norm", "sinks"), q_order)
    order |= dict.fromkeys(("k", "v", "k_bias", "v_bias", "k_norm"), kv_order)
    changes: dict[str, Any] = {"o": weights.o[:, q_order]}
    for name, heads in order.items():
        value = getattr(weights, name)
        changes[name] = None if value is None else value[heads]
    return replace(weights, **changes)
