"""Queries and keys that are normalised between projection and rotary embedding (Qwen3, Gemma 3, OLMo 2, Cohere).

A norm divides by a number that depends on the token, so nothing but a scale and signs passes through it exactly.
Folding therefore works on the linear map that the norm is on average, ``gain * W x / rms`` with ``rms`` the root mean
square over the calibration text, and writes the result back in front of a norm of the same kind.

Exact: groups of one; identical heads. Approximate otherwise:

* A shared key is divided by its own length, token by token, where its members had one each. This costs most (four
  fifths of the error where norms were put into a trained model without training it further; on a model trained with
  norms it was not measured), and no choice of gains removes it.
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
    """A projection with its norm, linearised: ``rows [n, D, F]`` (``F = E + 1``, bias last) and what was divided out.

    ``scale [n]`` is each head's root mean square in front of the norm (1 without a norm), ``gain [n, D]`` the norm's
    weight and ``constant [n, D]`` its bias.
    """

    rows: Tensor
    scale: Tensor
    gain: Tensor
    constant: Tensor
    norm: HeadNorm | None

    @property
    def affine(self) -> Tensor:
        """Rows with the norm's bias added: what queries and keys are on average, as linear maps of ``x~``."""
        return torch.cat((self.rows[..., :-1], self.rows[..., -1:] + self.constant[..., None]), -1)

    def select(self, heads: list[int]) -> "Linear":
        """Some heads, in that order."""
        norm = select(self.norm, heads)
        return Linear(self.rows[heads], self.scale[heads], self.gain[heads], self.constant[heads], norm)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Folded":
        """``change`` (a linear map over heads and dims) applied to the rows and to the constant."""
        return Folded(change(self.rows), change(self.constant[..., None])[..., 0])


def linearise(rows: Tensor, norm: HeadNorm | None, moment: Tensor) -> Linear:
    """``rows [n, D, F]`` of a projection and the norm behind it -> the linear map that both are on average."""
    ones = rows.new_ones(rows.shape[:2])
    if norm is None:
        return Linear(rows, ones[:, 0], ones, torch.zeros_like(ones), None)
    gain = norm.weight.double() + norm.offset
    constant = torch.zeros_like(gain) if norm.bias is None else norm.bias.double()
    rows = _centred(rows, norm)
    scale = _scale(rows, norm, moment)
    return Linear(rows * (gain / scale[:, None])[..., None], scale, gain, constant, norm)


def _centred(rows: Tensor, norm: HeadNorm) -> Tensor:
    """A layer norm subtracts the mean over its extent, which is linear."""
    if norm.kind == "rms":
        return rows
    return rows - (rows.mean(1, keepdim=True) if norm.extent == "head" else rows.mean((0, 1), keepdim=True))


def _scale(rows: Tensor, norm: HeadNorm, moment: Tensor) -> Tensor:
    """Root mean square ``[n]`` of what the norm divides by, over the calibration text."""
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


def restore(
    keys: Linear, queries: Linear, new_keys: Folded, new_queries: Folded, blocks: Sequence[Tensor], moment: Tensor
) -> tuple[Tensor, HeadNorm | None, Tensor, HeadNorm | None]:
    """Writes folded linear keys and queries as projections in front of norms of the source's kinds.

    ``blocks`` are the dims that may be rescaled together (rotary pairs). Returns rows ``[g, D, F]`` and norm of the
    keys, rows ``[H, D, F]`` and norm of the queries.
    """
    k, k_norm, missing = _write_keys(keys, new_keys, moment)
    new_queries = new_queries.times(missing.repeat_interleave(_per_group(new_queries, new_keys))[:, None])
    q, q_norm = _write_queries(queries, new_queries, blocks, moment)
    return k, k_norm, q, q_norm


def _write_keys(source: Linear, folded: Folded, moment: Tensor) -> tuple[Tensor, HeadNorm | None, Tensor]:
    """Rows and norm of the shared keys, and the factor ``[g]`` by which the norm's output falls short of ``folded``."""
    groups = len(folded.rows)
    if source.norm is None:
        return folded.rows, None, folded.rows.new_ones(groups)
    gain = torch.unflatten(source.gain, 0, (groups, -1)).mean(1)
    rows, missing = _before_norm(
        folded.rows, gain, torch.unflatten(source.scale, 0, (groups, -1)).mean(1), source.norm, moment
    )
    constant = folded.constant / missing[:, None]
    return rows, _norm_like(source.norm, gain, constant), missing


def _write_queries(
    source: Linear, folded: Folded, blocks: Sequence[Tensor], moment: Tensor
) -> tuple[Tensor, HeadNorm | None]:
    """Rows and norm of the queries; what the norm holds of each head's scale, as far as its weight's shape allows."""
    if source.norm is None:
        return folded.rows, None
    gain = _query_gain(source, folded, blocks, moment)
    rows, missing = _before_norm(folded.rows, gain, source.scale, source.norm, moment)
    if _one_row(source.norm):
        missing = missing.log().mean().exp().expand_as(missing)
    return rows, _norm_like(source.norm, gain * missing[:, None], folded.constant)


def _query_gain(source: Linear, folded: Folded, blocks: Sequence[Tensor], moment: Tensor) -> Tensor:
    """The source's gain times the modulus that folding gave each block of each head; one row where heads share it."""
    before, after = _energy(source.rows, blocks, moment), _energy(folded.rows, blocks, moment)
    modulus = torch.where((before > 0) & (after > 0), after / before, 1.0).sqrt()
    if source.norm is not None and _one_row(source.norm):
        modulus = modulus.log().mean(0, keepdim=True).exp().expand_as(modulus)
    return source.gain * _spread(modulus, blocks)


def _before_norm(rows: Tensor, gain: Tensor, scale: Tensor, norm: HeadNorm, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose normalised, gained values point along ``rows``, and by what factor ``[n]`` those fall short."""
    written = _undo(rows, gain) * scale[:, None, None]
    return written, _scale(_centred(written, norm), norm, moment) / scale


def _undo(rows: Tensor, gain: Tensor) -> Tensor:
    """``rows / gain``; a dim whose gain is 0 says nothing whatever stands there."""
    return torch.where(gain == 0, 0.0, 1 / gain)[..., None] * rows


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


def _per_group(queries: Folded, keys: Folded) -> int:
    return len(queries.rows) // len(keys.rows)


def _one_row(norm: HeadNorm) -> bool:
    return norm.shared and norm.extent == "head"


def _norm_like(norm: HeadNorm, gain: Tensor, constant: Tensor) -> HeadNorm:
    """A norm of the same kind with other parameters; ``shared`` rows of the bias are averaged."""
    if norm.shared:
        constant = constant.mean(0, keepdim=True).expand_as(constant)
        gain = gain.mean(0, keepdim=True).expand_as(gain)
    return replace(norm, weight=gain - norm.offset, bias=None if norm.bias is None else constant)


def select(norm: HeadNorm | None, heads: list[int]) -> HeadNorm | None:
    """The norm of some heads, in that order."""
    if norm is None:
        return None
    return replace(norm, weight=norm.weight[heads], bias=None if norm.bias is None else norm.bias[heads])


def in_float32(norm: HeadNorm | None) -> HeadNorm | None:
    """The norm with float32 parameters."""
    if norm is None:
        return None
    return replace(norm, weight=norm.weight.float(), bias=None if norm.bias is None else norm.bias.float())
