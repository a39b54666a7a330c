"""Folds of queries and keys with a norm between projection and rotary embedding (Qwen3, Gemma 3, OLMo 2, Cohere).

A norm divides by a number that depends on the token, so only a scale and signs pass through it exactly:

    norm(W x) = gain * W x / rms(W x) + bias

Folding therefore works on the linear map ``L = gain * W / rms(W)`` that this is on average, with ``rms(W)`` the root
mean square over the calibration text (keys: on the map of least squares, `head_norms`, where the statistics have it),
and writes a folded ``L'`` back in front of a norm of the same kind and gain:

    W' = rms_source * L' / gain      so that      norm(W' x) = L' x / shortfall,   shortfall = rms(W') / rms_source

A norm on the queries makes up for the shortfall by its gain. The shortfall of a shared key is made up for by the
queries that read it.

Exact: groups of one; identical heads. Approximate otherwise:

* A shared key is divided by its own length, token by token, where its members had one length each. This costs most
  (four fifths of the error where norms were put into a trained model without training it further), and no choice of
  gains removes it. Keys from the map of least squares, whose members are divided already, lose less: squared errors of
  the output of the four layers, 8 -> 2 heads, 0.058, 0.215, 0.165, 0.195 and 0.048, 0.173, 0.093, 0.118 (the shipped
  model with norms put in and trained on, recipes/benchmarks/bench_head_norms.py --folds). Queries from such a map lost
  more in three layers of four.
* Queries take their maps before their norm. A norm with one row per head keeps the sizes of the folded query's blocks,
  so that lengths stay nearly those of the source; one row for all heads holds the mean over heads, and heads whose
  scores should be scaled differently share one scale. Moving sizes between queries and keys to level them was worse.
* A layer norm removes the mean over the head's dims, which merging does not respect. A norm's bias that all heads share
  is the average of what each would need.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.convert.transforms.weights import HeadNorm


@dataclass(frozen=True)
class LinearizedNorm:
    """A projection with its norm as one linear map: ``rows [n, D, F]`` (``F = E + 1``, bias last) and its parts.

    ``rms [n]`` is each head's root mean square before the norm (1 without a norm), ``gain [n, D]`` the norm's weight
    and ``constant [n, D]`` its bias.
    """

    rows: Tensor
    rms: Tensor
    gain: Tensor
    constant: Tensor
    norm: HeadNorm | None

    @property
    def affine(self) -> Tensor:
        """``rows`` with the norm's bias added: queries or keys on average, as linear maps of ``x~``."""
        return torch.cat((self.rows[..., :-1], self.rows[..., -1:] + self.constant[..., None]), -1)

    def select(self, heads: list[int]) -> "LinearizedNorm":
        """Some heads, in that order."""
        norm = None if self.norm is None else self.norm.map(lambda row: row[heads])
        return LinearizedNorm(self.rows[heads], self.rms[heads], self.gain[heads], self.constant[heads], norm)

    def fold(self, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """``change`` (a linear map over heads and dims) applied to the rows and to the constant."""
        return change(self.rows), change(self.constant[..., None])[..., 0]


@dataclass(frozen=True)
class NormedProjection:
    """A projection ``rows [n, D, F]`` and the norm after it, together the wanted linear map over ``shortfall [n]``."""

    rows: Tensor
    norm: HeadNorm | None
    shortfall: Tensor


def linearize(rows: Tensor, norm: HeadNorm | None, moment: Tensor) -> LinearizedNorm:
    """``rows [n, D, F]`` of a projection and the norm after it -> the linear map that both are on average.

    ``moment [F, F]``: the second moment of the inputs with a constant 1 appended.
    """
    ones = rows.new_ones(rows.shape[:2])
    if norm is None:
        return LinearizedNorm(rows, ones[:, 0], ones, torch.zeros_like(ones), None)
    gain = norm.weight.double() + norm.offset
    constant = torch.zeros_like(gain) if norm.bias is None else norm.bias.double()
    rows, rms = _divided_by(rows, norm, moment)
    return LinearizedNorm(rows * (gain / rms[:, None])[..., None], rms, gain, constant, norm)


def restore(
    keys: LinearizedNorm,
    queries: LinearizedNorm,
    merge_keys: Callable[[Tensor], Tensor],
    map_queries: Callable[[Tensor], Tensor],
    blocks: Sequence[Tensor],
    moment: Tensor,
) -> tuple[NormedProjection, NormedProjection]:
    """Folds linearized keys and queries and writes them as projections in front of norms of the source's kinds.

    ``merge_keys`` takes ``[G, D, F]`` to ``[g, D, F]``, ``map_queries`` ``[H, D, F]`` to the same shape. ``blocks`` are
    the dims that may be rescaled together (rotary pairs). Returns the keys and the queries, which make up for the keys'
    shortfall.
    """
    key_rows, key_constant = keys.fold(merge_keys)
    gain, rms = (torch.unflatten(part, 0, (len(key_rows), -1)).mean(1) for part in (keys.gain, keys.rms))
    written = _write(key_rows, key_constant, gain, rms, keys.norm, moment)
    rows, constant = queries.fold(map_queries)
    # Queries that read a shared key make up for its shortfall.
    owed = written.shortfall.repeat_interleave(len(rows) // len(key_rows))[:, None]
    rows, constant, gain = rows * owed[..., None], constant * owed, queries.gain
    if queries.norm is not None:
        gain = gain * _block_sizes(queries, rows, blocks, moment)
    return written, _write(rows, constant, gain, queries.rms, queries.norm, moment, in_gain=True)


def _write(
    target: Tensor,
    constant: Tensor,
    gain: Tensor,
    rms: Tensor,
    norm: HeadNorm | None,
    moment: Tensor,
    *,
    in_gain: bool = False,
) -> NormedProjection:
    """The linear map ``target [n, D, F]`` and ``constant [n, D]`` as a projection in front of a norm like ``norm``.

    ``gain [n, D]`` of the new norm, ``rms [n]`` of the source. ``in_gain``: the norm's gain makes up for the shortfall,
    on average over the heads where they share one row.
    """
    one = torch.ones_like(rms)
    if norm is None:
        return NormedProjection(target, None, one)
    inverse = torch.where(gain == 0, 0.0, 1 / gain)  # a dim with gain 0 is dead: its rows do not matter
    rows = target * inverse[..., None] * rms[:, None, None]
    shortfall = _divided_by(rows, norm, moment)[1] / rms
    if in_gain:
        if norm.shared and norm.extent == "head":
            shortfall = shortfall.log().mean().exp().expand_as(shortfall)
        gain, shortfall = gain * shortfall[:, None], one
    else:
        constant = constant / shortfall[:, None]
    if norm.shared:  # the file holds one row for all heads: the mean of what each needs
        constant = constant.mean(0, keepdim=True).expand_as(constant)
        gain = gain.mean(0, keepdim=True).expand_as(gain)
    norm = replace(norm, weight=gain - norm.offset, bias=None if norm.bias is None else constant)
    return NormedProjection(rows, norm, shortfall)


def _divided_by(rows: Tensor, norm: HeadNorm, moment: Tensor) -> tuple[Tensor, Tensor]:
    """``rows [n, D, F]``, centered for a layer norm, and their root mean square ``[n]`` over the extent of ``norm``."""
    if norm.kind == "layer":  # it subtracts the mean over its extent, which is linear
        rows = rows - (rows.mean(1, keepdim=True) if norm.extent == "head" else rows.mean((0, 1), keepdim=True))
    square = ((rows @ moment) * rows).sum(-1).mean(-1)
    if norm.extent == "flat":
        square = square.mean().expand_as(square)
    return rows, (square + norm.eps).sqrt()


def _block_sizes(source: LinearizedNorm, rows: Tensor, blocks: Sequence[Tensor], moment: Tensor) -> Tensor:
    """``[n, D]``: the factor by which folding changed the size of each block of dims of each query head.

    One row for all heads, the geometric mean, where their norm has one row.
    """

    def energy(rows: Tensor) -> Tensor:
        square = ((rows @ moment) * rows).sum(-1)
        return torch.stack([square[:, block].sum(-1) for block in blocks], -1)

    before, after = energy(source.rows), energy(rows)
    size = torch.where((before > 0) & (after > 0), after / before, 1.0).sqrt()
    if source.norm is not None and source.norm.shared and source.norm.extent == "head":
        size = size.log().mean(0, keepdim=True).exp().expand_as(size)
    spread = torch.empty_like(source.gain)
    for index, block in enumerate(blocks):
        spread[:, block] = size[:, index : index + 1]
    return spread
