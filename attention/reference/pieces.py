"""The pieces of the formulas: projections, rotary embedding, scores, masks, softmax. Shapes as in whole.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Rotary = Callable[[Tensor, Tensor], Tensor]  # x [T, D], positions [T] -> [T, D]


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Query, key or value of one head, ``q_t = W x_t + b`` (Vaswani 2017, 3.2.2).

    ``x [T, E]``, ``weight [D, E]``, ``bias [D]`` -> ``[T, D]``.
    """
    rows = [weight @ token if bias is None else weight @ token + bias for token in x]
    return torch.stack(rows)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding (Su 2021, eq. 14-15): pair ``l`` is rotated by the angle ``t theta_l``.

        x'_a = x_a cos(t theta_l) - x_b sin(t theta_l),    x'_b = x_a sin(t theta_l) + x_b cos(t theta_l)

    Pair ``l`` is ``(a, b) = (2 l, 2 l + 1)`` if interleaved, else ``(l, l + Dr / 2)``; dims from ``Dr`` on stay.
    ``x [T, D]``, ``positions [T]``, ``frequencies [Dr / 2]`` -> ``[T, D]``.
    """
    pairs = len(frequencies)
    rows = []
    for token, position in zip(x, positions, strict=True):
        row = list(token)
        for pair in range(pairs):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)
            angle = position.double() * frequencies[pair].double()
            row[a] = token[a] * torch.cos(angle) - token[b] * torch.sin(angle)
            row[b] = token[a] * torch.sin(angle) + token[b] * torch.cos(angle)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def rotary_by(frequencies: Tensor, interleaved: bool = False) -> Rotary:
    """``rotate`` by the frequencies ``[Dr / 2]`` of a layer."""
    return partial(rotate, frequencies=frequencies, interleaved=interleaved)


def no_rotary(x: Tensor, positions: Tensor) -> Tensor:
    """No rotary embedding."""
    return x


def project_head(
    x: Tensor, weight: Tensor, bias: Tensor | None, head: int, rotary: Rotary, positions: Tensor
) -> Tensor:
    """``project`` by head ``head`` of ``weight [H, D, E]`` and ``bias [H, D]``, then rotated: ``[T, D]``."""
    return rotary(project(x, weight[head], None if bias is None else bias[head]), positions)


def scores(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """``s_ij = q_i . k_j / sqrt(d_head)`` (Vaswani 2017, eq. 1): ``[T, D]``, ``[S, D]`` -> ``[T, S]``."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.stack([torch.stack([factor * (q * k).sum() for k in key]) for q in query])


def causal_mask(score: Tensor, offset: int = 0) -> Tensor:
    """``s_ij = -inf`` for ``j > i + offset`` (Vaswani 2017, 3.2.3); ``offset`` tokens precede query 0."""
    rows = torch.arange(score.shape[0])[:, None]
    return score.masked_fill(torch.arange(score.shape[1]) > rows + offset, -torch.inf)


def window_mask(score: Tensor, window: int, offset: int = 0) -> Tensor:
    """``s_ij = -inf`` where ``|i + offset - j| >= window`` (Beltagy et al. 2020, "Longformer")."""
    rows = torch.arange(score.shape[0])[:, None] + offset
    return score.masked_fill((rows - torch.arange(score.shape[1])).abs() >= window, -torch.inf)


def padding_mask(score: Tensor, start: int, length: int) -> Tensor:
    """``s_ij = -inf`` for keys ``j`` outside of ``start .. length - 1``."""
    columns = torch.arange(score.shape[1])
    return score.masked_fill((columns < start) | (columns >= length), -torch.inf)


def softmax_rows(score: Tensor) -> Tensor:
    """``a_ij = exp(s_ij) / sum_j exp(s_ij)``, ``[T, S]``; a row of ``-inf`` (a query that sees nothing) gives zeros."""
    rows = []
    for row in score:
        if bool((row == -torch.inf).all()):
            rows.append(torch.zeros_like(row))
            continue
        powers = torch.exp(row - row.detach().max())
        rows.append(powers / powers.sum())
    return torch.stack(rows)


def weighted_values(weights: Tensor, value: Tensor) -> Tensor:
    """``z_i = sum_j a_ij v_j``: ``[T, S]``, ``[S, Dv]`` -> ``[T, Dv]``."""
    return torch.stack([sum((a * v for a, v in zip(row, value, strict=True)), torch.zeros(())) for row in weights])


def project_output(heads: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``y_t = sum_h W_o,h z_h,t + b``: ``heads [H, T, Dv]``, ``weight [E, H, Dv]``, ``bias [E]`` -> ``[T, E]``.

    The same as Vaswani's ``Concat(z_1 .. z_H) W_o``, the product written by blocks.
    """
    result = []
    for token in range(heads.shape[1]):
        y = sum((weight[:, head] @ heads[head, token] for head in range(heads.shape[0])), torch.zeros(()))
        result.append(y if bias is None else y + bias)
    return torch.stack(result)


@dataclass(frozen=True)
class Masks:
    """The masks of one sequence: the three above and an additive bias ``[H, T, S]``."""

    causal: bool = True
    offset: int = 0
    window: int | None = None
    start: int = 0
    length: int | None = None
    bias: Tensor | None = None

    def apply(self, score: Tensor, head: int) -> Tensor:
        score = score if self.bias is None else score + self.bias[head]
        score = causal_mask(score, self.offset) if self.causal else score
        score = score if self.window is None else window_mask(score, self.window, self.offset)
        return padding_mask(score, self.start, score.shape[1] if self.length is None else self.length)


CAUSAL = Masks()
BIDIRECTIONAL = Masks(causal=False)


def attention(query: Tensor, key: Tensor, value: Tensor, masks: Masks, head: int, scale: float | None = None) -> Tensor:
    """Scaled dot-product attention of one head, ``softmax(mask(q k^T / sqrt(d_head))) v`` (Vaswani 2017, 3.2.1).

    ``query [T, D]``, ``key [S, D]``, ``value [S, Dv]`` -> ``[T, Dv]``.
    """
    return weighted_values(softmax_rows(masks.apply(scores(query, key, scale), head)), value)
