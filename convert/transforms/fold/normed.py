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

* A shared key is divided by its own length, token by token, whereas each member was divided by its
  own. This costs most (four fifths of the error where norms were added to a trained model), and no
  choice of gains removes it. Keys from the least-squares map, whose members are already divided,
  lose less: squared errors of the output of the four layers, 8 -> 2 heads, 0.058, 0.215, 0.165,
  0.195 and 0.048, 0.173, 0.093, 0.118 (the shipped model with norms added and then trained,
  bench_head_norms.py --folds). Queries from such a map lost more in three of
  four layers.
* Queries are mapped before their norm. A norm with one row per head preserves the sizes of the
  folded query's blocks, so lengths stay close to the source's; a single row for all heads contains
  the mean over heads.
* A layer norm removes the mean over the head's dims, which merging does not preserve. A norm bias
  that all heads share is the average of the biases that the heads need.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms.head_norms import (
    LinearizedNorm,
    center,
    root_mean_square,
)
from kvfold.convert.transforms.weights import HeadNorm


def restore(
    keys: LinearizedNorm,
    queries: LinearizedNorm,
    encode: Tensor,
    decode: Tensor,
    blocks: Sequence[Tensor],
    moment: Tensor,
) -> tuple[tuple[Tensor, HeadNorm | None], tuple[Tensor, HeadNorm | None]]:
    """Fold linearized keys and queries, and write them as projections in front of norms of the
    source's kinds.

    ``encode [g, m, D, D]`` merges the ``m`` members of every shared key, ``decode [H, D, D]``
    changes the queries that read it; the heads of each group are adjacent. ``blocks`` are the sets
    of dims that may be rescaled together (rotary pairs). Returns the rows and norm of the keys,
    ``[g, D, F]``, then those of the queries, ``[H, D, F]``.
    """
    groups = len(encode)
    rows, constant = (
        torch.einsum("gmab,gmbf->gaf", encode, torch.unflatten(part, 0, (groups, -1)))
        for part in (keys.rows, keys.constant[..., None])
    )
    gain, rms = (
        torch.unflatten(part, 0, (groups, -1)).mean(1) for part in (keys.gain, keys.divisor)
    )
    k, k_norm, shortfall = _write(rows, constant[..., 0], gain, rms, keys.norm, moment)
    # Queries that read a shared key compensate for its shortfall.
    decode = decode * shortfall.repeat_interleave(len(decode) // groups)[:, None, None]
    rows = decode.mT @ queries.rows
    constant = decode.mT @ queries.constant[..., None]
    gain = queries.gain
    if queries.norm is not None:
        gain = gain * _block_sizes(queries, rows, blocks, moment)
    q, q_norm, _ = _write(
        rows, constant[..., 0], gain, queries.divisor, queries.norm, moment, in_gain=True
    )
    return (k, k_norm), (q, q_norm)


def _write(
    target: Tensor,
    constant: Tensor,
    gain: Tensor,
    rms: Tensor,
    norm: HeadNorm | None,
    moment: Tensor,
    *,
    in_gain: bool = False,
) -> tuple[Tensor, HeadNorm | None, Tensor]:
    """Return ``target [n, D, F]``, ``constant [n, D]`` as rows and a norm like ``norm``, and the
    shortfall.

    ``in_gain``: the gain compensates for the shortfall, which is then returned as 1.
    """
    one = torch.ones_like(rms)
    if norm is None:
        return target, None, one
    # A dim with gain 0 is dead, so its rows have no effect.
    inverse = torch.where(gain == 0, 0.0, 1 / gain)
    rows = target * inverse[..., None] * rms[:, None, None]
    shortfall = root_mean_square(center(rows, norm), norm, moment) / rms
    if in_gain:
        # One row for all heads compensates for their mean shortfall.
        if norm.shared and norm.extent == "head":
            shortfall = shortfall.log().mean().exp().expand_as(shortfall)
        gain = gain * shortfall[:, None]
        shortfall = one
    else:
        constant = constant / shortfall[:, None]
    # The file stores one row for all heads: use the mean of their rows.
    if norm.shared:
        constant, gain = (part.mean(0, keepdim=True).expand_as(part) for part in (constant, gain))
    norm = replace(norm, weight=gain - norm.offset, bias=None if norm.bias is None else constant)
    return rows, norm, shortfall


def _block_sizes(
    source: LinearizedNorm, rows: Tensor, blocks: Sequence[Tensor], moment: Tensor
) -> Tensor:
    """The factor ``[n, D]`` by which folding changed the size of each block of dims in each query
    head.
    """
    before, after = (((part @ moment) * part).sum(-1) for part in (source.rows, rows))
    sizes = torch.empty_like(source.gain)
    for block in blocks:
        old = before[:, block].sum(-1, keepdim=True)
        new = after[:, block].sum(-1, keepdim=True)
        sizes[:, block] = torch.where((old > 0) & (new > 0), new / old, 1.0).sqrt()
    # Use the geometric mean over all heads if they share one row of the norm.
    if source.norm is not None and source.norm.shared and source.norm.extent == "head":
        sizes = sizes.log().mean(0, keepdim=True).exp().expand_as(sizes)
    return sizes
