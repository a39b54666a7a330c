"""Queries and keys that are normalized between projection and rotary embedding (Qwen3, Gemma 3, OLMo 2, Cohere).

A norm divides by a number that depends on the token, so nothing but a scale and signs passes through it exactly:

    norm(W x) = gain * W x / rms(W x) + bias

Folding therefore works on the linear map ``L = gain * W / rms(W)`` that this is on average, with ``rms(W)`` the root
mean square over the calibration text (keys: on the map of least squares, `head_norms`, where the statistics have it),
and writes a folded ``L'`` back in front of a norm of the same kind and gain:

    W' = rms_source * L' / gain      so that      norm(W' x) = L' x / shortfall,   shortfall = rms(W') / rms_source

A norm on the queries makes up for the shortfall by its gain. A shared key leaves it to the queries that read it.

Exact: groups of one; identical heads. Approximate otherwise:

* A shared key is divided by its own length, token by token, where its members had one each. This costs most (four
  fifths of the error where norms were put into a trained model without training it further), and no choice of gains
  removes it. Keys from the map of least squares, whose members are divided already, lose less: squared errors of
  the output of the four layers, 8 -> 2 heads, 0.058, 0.215, 0.165, 0.195 and 0.048, 0.173, 0.093, 0.118 (the shipped
  model with norms put in and trained on, recipes/benchmarks/bench_head_norms.py --folds). Queries from such a map lost
  more in three layers of four.
* Queries take their maps before their norm. A norm with a row of its own per head holds the moduli afterwards, so that
  lengths stay nearly those of the source; one row for all heads holds their mean, and heads whose scores should be
  scaled differently share one scale. Moving moduli between queries and keys to level those scales made it worse.
* A layer norm removes the mean over the head's dims, which merging does not respect. A norm's bias that all heads share
  is the average of what each would need.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.convert.transforms.weights import HeadNorm


@dataclass(frozen=True)
class Linear:
    """A projection with its norm, linearized: ``rows [n, D, F]`` (``F = E + 1``, bias last) and what was divided out.

    ``rms [n]`` is each head's root mean square in front of the norm (1 without a norm), ``gain [n, D]`` the norm's
    weight and ``constant [n, D]`` its bias.
    """

    rows: Tensor
    rms: Tensor
    gain: Tensor
    constant: Tensor
    norm: HeadNorm | None

    @property
    def affine(self) -> Tensor:
        """Rows with the norm's bias added: what queries and keys are on average, as linear maps of ``x~``."""
        return torch.cat((self.rows[..., :-1], self.rows[..., -1:] + self.constant[..., None]), -1)

    def select(self, heads: list[int]) -> "Linear":
        """Some heads, in that order."""
        norm = None if self.norm is None else self.norm.map(lambda row: row[heads])
        return Linear(self.rows[heads], self.rms[heads], self.gain[heads], self.constant[heads], norm)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Folded":
        """``change`` (a linear map over heads and dims) applied to the rows and to the constant."""
        return Folded(change(self.rows), change(self.constant[..., None])[..., 0])


def linearize(rows: Tensor, norm: HeadNorm | None, moment: Tensor) -> Linear:
    """``rows [n, D, F]`` of a projection and the norm behind it -> the linear map that both are on average."""
    ones = rows.new_ones(rows.shape[:2])
    if norm is None:
        return Linear(rows, ones[:, 0], ones, torch.zeros_like(ones), None)
    gain = norm.weight.double() + norm.offset
    constant = torch.zeros_like(gain) if norm.bias is None else norm.bias.double()
    rms = _rms(rows, norm, moment)
    return Linear(_centered(rows, norm) * (gain / rms[:, None])[..., None], rms, gain, constant, norm)


def _centered(rows: Tensor, norm: HeadNorm) -> Tensor:
    """A layer norm subtracts the mean over its extent, which is linear."""
    if norm.kind == "rms":
        return rows
    return rows - (rows.mean(1, keepdim=True) if norm.extent == "head" else rows.mean((0, 1), keepdim=True))


def _rms(rows: Tensor, norm: HeadNorm, moment: Tensor) -> Tensor:
    """Root mean square ``[n]`` of what ``norm`` divides ``rows x~`` by, over the calibration text."""
    rows = _centered(rows, norm)
    square = ((rows @ moment) * rows).sum(-1).mean(-1)
    if norm.extent == "flat":
        square = square.mean().expand_as(square)
    return (square + norm.eps).sqrt()


@dataclass(frozen=True)
class Folded:
    """Folded queries or keys as linear maps: ``rows [n, D, F]`` and the constant ``[n, D]`` behind their norm."""

    rows: Tensor
    constant: Tensor

    def times(self, factor: Tensor) -> "Folded":
        """Every head's dims multiplied by ``factor``, broadcast over ``[n, D]``."""
        return Folded(self.rows * factor[..., None], self.constant * factor)


@dataclass(frozen=True)
class Written:
    """A projection ``rows [n, D, F]`` and the norm behind it: together the target linear map over ``shortfall [n]``."""

    rows: Tensor
    norm: HeadNorm | None
    shortfall: Tensor


def restore(
    keys: Linear, queries: Linear, new_keys: Folded, new_queries: Folded, blocks: Sequence[Tensor], moment: Tensor
) -> tuple[Written, Written]:
    """Writes folded linear keys and queries as projections in front of norms of the source's kinds.

    ``blocks`` are the dims that may be rescaled together (rotary pairs). Returns the keys, ``rows [g, D, F]``, and the
    queries, ``rows [H, D, F]``, which make up for the keys' shortfall.
    """
    groups = len(new_keys.rows)
    gain, rms = (torch.unflatten(part, 0, (groups, -1)).mean(1) for part in (keys.gain, keys.rms))
    written = _write(new_keys, gain, rms, keys.norm, moment, in_gain=False)
    owed = written.shortfall.repeat_interleave(len(new_queries.rows) // groups)
    new_queries = new_queries.times(owed[:, None])
    gain = queries.gain if queries.norm is None else _query_gain(queries, new_queries, blocks, moment)
    return written, _write(new_queries, gain, queries.rms, queries.norm, moment, in_gain=True)


def _write(
    folded: Folded, gain: Tensor, rms: Tensor, norm: HeadNorm | None, moment: Tensor, *, in_gain: bool
) -> Written:
    """``folded`` as a projection in front of a norm like ``norm`` with ``gain [n, D]``, ``rms [n]`` that of the source.

    ``in_gain``: the norm's gain makes up for the shortfall, on average over the heads where they share one row.
    """
    one = torch.ones_like(rms)
    if norm is None:
        return Written(folded.rows, None, one)
    inverse = torch.where(gain == 0, 0.0, 1 / gain)  # a dim with gain 0 is dead: its rows do not matter
    rows = folded.rows * inverse[..., None] * rms[:, None, None]
    shortfall = _rms(rows, norm, moment) / rms
    if not in_gain:
        return Written(rows, _norm_like(norm, gain, folded.constant / shortfall[:, None]), shortfall)
    if _one_row(norm):
        shortfall = shortfall.log().mean().exp().expand_as(shortfall)
    return Written(rows, _norm_like(norm, gain * shortfall[:, None], folded.constant), one)


def _query_gain(source: Linear, folded: Folded, blocks: Sequence[Tensor], moment: Tensor) -> Tensor:
    """The source's gain times the modulus that folding gave each block of each head; one row where heads share it."""
    before, after = _energy(source.rows, blocks, moment), _energy(folded.rows, blocks, moment)
    modulus = torch.where((before > 0) & (after > 0), after / before, 1.0).sqrt()
    if source.norm is not None and _one_row(source.norm):
        modulus = modulus.log().mean(0, keepdim=True).exp().expand_as(modulus)
    return source.gain * _spread(modulus, blocks)


def _energy(rows: Tensor, blocks: Sequence[Tensor], moment: Tensor) -> Tensor:
    """Mean square of each block of dims, summed over its dims: ``[n, D, F] -> [n, blocks]``."""
    square = ((rows @ moment) * rows).sum(-1)
    return torch.stack([square[:, block].sum(-1) for block in blocks], -1)


def _spread(values: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """One value per block ``[n, blocks]`` -> per dim ``[n, D]``."""
    result = values.new_empty(len(values), sum(block.numel() for block in blocks))
    for index, block in enumerate(blocks):
        result[:, block] = values[:, index : index + 1]
    return result


def _one_row(norm: HeadNorm) -> bool:
    return norm.shared and norm.extent == "head"


def _norm_like(norm: HeadNorm, gain: Tensor, constant: Tensor) -> HeadNorm:
    """A norm of the same kind with other parameters; ``shared`` rows of the bias are averaged."""
    if norm.shared:
        constant = constant.mean(0, keepdim=True).expand_as(constant)
        gain = gain.mean(0, keepdim=True).expand_as(gain)
    return replace(norm, weight=gain - norm.offset, bias=None if norm.bias is None else constant)
