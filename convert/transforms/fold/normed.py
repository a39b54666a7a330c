"""Folds queries and keys that have a norm between projection and rotary embedding (Qwen3, Gemma 3,
OLMo 2, Cohere).

A norm divides by a number that depends on the token, so only a scale and signs pass through it
exactly:

    norm(W x) = gain * W x / rms(W x) + bias

The fold therefore uses the average linear map ``L = gain * W / rms(W)``, where ``rms(W)`` is the
root mean square over the calibration text (for keys, the least-squares map from `head_norms` if the
statistics contain it). It then writes the folded map ``L'`` as a projection in front of a norm of
the same kind and gain:

    W' = rms_source * L' / gain      so that      norm(W' x) = L' x / shortfall,   shortfall =
    rms(W') / rms_source

A norm on the queries compensates for their shortfall by its gain. The shortfall of a shared key is
compensated by the queries that read it.

Groups of one head and identical heads fold exactly. All others are approximations:

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

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms.fold.heads import merge_heads
from kvfold.convert.transforms.head_norms import (
    LinearizedNorm,
    compute_divisors,
    subtract_mean,
)
from kvfold.convert.transforms.weights import HeadNorm


def merge_normed_heads(
    keys: LinearizedNorm,
    queries: LinearizedNorm,
    encode: Tensor,
    decode: Tensor,
    blocks: Tensor,
    moment: Tensor,
) -> tuple[tuple[Tensor, HeadNorm | None], tuple[Tensor, HeadNorm | None]]:
    """Fold keys and queries whose norms are replaced by average linear maps, and write the result
    as projections in front of norms of the same kinds.

    ``encode [g, m, D, D]`` merges the ``m`` heads of every shared key, ``decode [H, D, D]``
    changes the queries that read it; the heads of each group are adjacent. ``blocks [D, D]`` has
    ones where two dims may only be rescaled together (rotary pairs), else zeros. Returns the rows
    and norm of the keys, ``[g, D, F]``, then those of the queries, ``[H, D, F]``.
    """
    groups = len(encode)
    merged = merge_heads(encode, torch.cat([keys.rows, keys.constant[..., None]], -1))
    k = merged[..., :-1]
    k_norm = keys.norm
    if k_norm is not None:
        gain = torch.unflatten(keys.gain, 0, (groups, -1)).mean(1)
        rms = torch.unflatten(keys.divisor, 0, (groups, -1)).mean(1)
        k, shortfall = _solve_projection_and_shortfall(k, k_norm, gain, rms, moment)
        k_norm = _replace_norm_weights(k_norm, gain, merged[..., -1] / shortfall[:, None])
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
