"""Attention weight by distance, and the KL divergence of two attentions, without ever holding a whole map.

Shapes: ``B`` sequences, ``H`` query heads, ``G`` key heads (``H`` a multiple of ``G``; head ``h`` reads key head
``h // (H // G)``), ``T`` positions, ``D`` head dim. Rows of the map are queries; they are made in blocks of rows, so
that memory is ``O(T)`` and not ``O(T^2)``. Arithmetic is float32 (float64 for float64 inputs), sums are float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attention.drift.softcap import softmax_beside

# Scores held at once: they bound memory, to 4 MB and 256 MB of float32. The CPU time of a profile of 8 heads and 2048
# tokens is flat from 1 << 16 to 1 << 24, 0.12 to 0.16 s (recipes/benchmarks/bench_refine_constants.py --blocks).
_CPU_BLOCK = 1 << 20
_GPU_BLOCK = 1 << 26
_ROWS = 128  # queries of a block at most: with causal masks half of the last 128 x 128 scores are wasted
_FEW_ROWS = 16  # at least, whatever the memory: fewer queries make the products matrix by vector
_NEGLIGIBLE = -80.0  # a log probability whose p is below what float32 adds up, and whose 1/p would soon overflow it


@dataclass(frozen=True)
class _Block:
    """Queries ``first .. last - 1`` against keys ``low .. high - 1`` (all that any of them sees)."""

    first: int
    last: int
    low: int
    high: int


@torch.no_grad()
def distance_profile(
    query: Tensor,
    key: Tensor,
    scale: float,
    *,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
) -> Tensor:
    """Average attention weight by distance: ``[H, T]``, float64, each row sums to 1; the first of `attention_sums`."""
    return attention_sums(query, key, scale, window=window, causal=causal, softcap=softcap)[0]


@torch.no_grad()
def attention_sums(
    query: Tensor,
    key: Tensor,
    scale: float,
    *,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention weight by distance, ``[H, T]``, and by key, ``[B, T]``; both float64.

    With the attention weights ``a`` of ``query [B, H, T, D]`` on ``key [B, G, T, D]``,

        p_h(delta) = 1 / (B T) * sum over b, s of a[b, h, s, s - delta]
        r_b(s)     = 1 / H * sum over h, t of a[b, h, t, s]

    so the rows of ``p`` sum to 1 and those of ``r`` to ``T``. Without ``causal``, ``delta`` is the distance either way.
    ``window`` is the number of keys a query sees, itself included (either way without ``causal``); ``softcap`` is that
    of Gemma 2; ``sinks [H]`` are the scores of one more key without a value (gpt-oss): its share of each row is in
    neither, and ``p`` is what is left, made to sum to 1. Raises ValueError for shapes that do not fit.
    """
    _check(query, key, window)
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    share = heads // groups
    sink = None if sinks is None else sinks.view(groups, share, 1, 1).repeat(batch, 1, 1, 1)
    query = query.reshape(batch * groups, share, length, -1)
    key = key.reshape(batch * groups, length, -1)
    total = torch.zeros(batch * groups, share, 2 * length, dtype=torch.float64, device=query.device)
    received = torch.zeros(batch * groups, length, dtype=torch.float64, device=query.device)
    for block in _blocks(length, window, causal, share, query.device):
        rows, width = block.last - block.first, block.high - block.low
        for part in _parts(batch * groups, share * rows * (width + rows - 1), query.device):
            beside = None if sink is None else sink[part].flatten(0, 1)
            weights = _attention(query[part], key[part], block, scale, window, causal, softcap, beside)
            sum_by_distance(weights, block.first, block.low, total[part].flatten(0, 1))
            received[part, block.low : block.high] += torch.unflatten(weights, 0, (-1, share)).sum((1, 2))
    folded = total[..., 1 : length + 1].flip(-1)
    if not causal:
        folded = torch.cat([folded[..., :1], folded[..., 1:] + total[..., length + 1 :]], dim=-1)
    profile = folded.view(batch, heads, length).sum(0)
    return profile / profile.sum(-1, keepdim=True), received.view(batch, groups, length).sum(1) / heads


@torch.no_grad()
def row_kl(
    query: Tensor,
    key: Tensor,
    other_query: Tensor,
    other_key: Tensor,
    scale: float,
    other_scale: float,
    *,
    window: int | None = None,
    causal: bool = True,
    softcap: float | None = None,
    other_softcap: float | None = None,
) -> Tensor:
    """Mean over batch and queries of ``KL(p || p')`` between two models' attention rows, in nats: ``[H]``, float64.

    ``query [B, H, T, D]`` and ``key [B, G, T, D]`` give ``p``; ``other_query [B, H, T, D']`` and ``other_key
    [B, G', T, D']`` give ``p'``: both models have the same heads and masks, not the same head dim or key heads.
    Equal maps give exactly 0.
    """
    _check(query, key, window)
    _check(other_query, other_key, window)
    batch, heads, length, _ = query.shape
    if other_query.shape[:3] != query.shape[:3]:
        expected, found = list(query.shape[:3]), list(other_query.shape[:3])
        raise ValueError(f"other_query: expected batch, heads and length {expected} as in query, found {found}")
    key = key.repeat_interleave(heads // key.shape[1], 1).flatten(0, 1)
    other_key = other_key.repeat_interleave(heads // other_key.shape[1], 1).flatten(0, 1)
    query, other_query = query.reshape(batch * heads, 1, length, -1), other_query.reshape(batch * heads, 1, length, -1)
    total = torch.zeros(batch * heads, dtype=torch.float64, device=query.device)
    for block in _blocks(length, window, causal, 4, query.device):
        rows, width = block.last - block.first, block.high - block.low
        for part in _parts(batch * heads, 4 * rows * width, query.device):
            log_p = _log_rows(query[part], key[part], block, scale, window, causal, softcap)
            log_q = _log_rows(other_query[part], other_key[part], block, other_scale, window, causal, other_softcap)
            total[part] += divergence(log_p, log_q).sum(-1).sum(-1, dtype=torch.float64)
    return total.view(batch, heads).mean(0) / length


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``p log(p / q) - p + q`` elementwise, 0 where both are masked; over whole distributions it sums to the KL.

    Written as ``p (expm1(d) - d)``, ``d = log q - log p``: no negative terms, and nothing cancels where p is near q.
    """
    ratio = log_q - log_p
    p = log_p.exp()
    terms = torch.expm1(ratio).sub_(ratio).mul_(p)
    return torch.where(log_p < _NEGLIGIBLE, log_q.exp().sub_(p).clamp_min_(0), terms)


def _log_rows(
    query: Tensor, key: Tensor, block: _Block, scale: float, window: int | None, causal: bool, softcap: float | None
) -> Tensor:
    """Log of the attention weights of a block: ``[n, rows, width]``, ``-inf`` where masked."""
    scores = _product(query, key, block, scale, softcap)
    _mask(scores, block, window, causal)
    return torch.log_softmax(scores, -1)


def _attention(
    query: Tensor,
    key: Tensor,
    block: _Block,
    scale: float,
    window: int | None,
    causal: bool,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """A block of attention weights, ``[n * share, rows, width]``; ``sink [n * share, 1, 1]``."""
    scores = _product(query, key, block, scale, softcap).view(-1, block.last - block.first, block.high - block.low)
    _mask(scores, block, window, causal)
    return torch.softmax(scores, -1) if sink is None else softmax_beside(scores, sink)


def _product(query: Tensor, key: Tensor, block: _Block, scale: float, softcap: float | None) -> Tensor:
    """Scores of a block, unmasked: ``query [n, share, T, D]``, ``key [n, T, D]`` -> ``[n, share * rows, width]``."""
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = query[:, :, block.first : block.last].flatten(1, 2).to(wide) * scale
    scores = rows @ key[:, block.low : block.high].to(wide).mT
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _mask(scores: Tensor, block: _Block, window: int | None, causal: bool) -> None:
    """Set what a query does not see to ``-inf``, in place: ``scores [n, rows, width]``."""
    queries = torch.arange(block.first, block.last, device=scores.device)[:, None]
    if causal:
        edge = slice(block.first - block.low, None)
        keys = torch.arange(block.first, block.high, device=scores.device)
        scores[..., edge].masked_fill_(keys > queries, -torch.inf)
    if window is not None:
        keys = torch.arange(block.low, block.high, device=scores.device)
        scores.masked_fill_((queries - keys).abs() >= window, -torch.inf)


def sum_by_distance(weights: Tensor, first: int, low: int, total: Tensor) -> None:
    """Add a block of maps to its sums by distance: column ``T + d`` of ``total [maps, 2T]`` holds ``key - query = d``.

    ``weights [maps, rows, width]`` are those of queries ``first ..`` on keys ``low ..``. Equal distances lie on a
    diagonal. Each row is written 1 further to the right than the one below it, into zeros, so that they lie in a
    column; of 4 queries ``a .. d`` on 4 keys, with ``b0`` the second query's weight on the first key::

        a0 a1 a2 a3        .  .  .  a0 a1 a2 a3
        b0 b1 b2 b3   ->   .  .  b0 b1 b2 b3 .
        c0 c1 c2 c3        .  c0 c1 c2 c3 .  .
        d0 d1 d2 d3        d0 d1 d2 d3 .  .  .
                          -3 -2 -1  0  1  2  3  + low - first

    Rows that are stored 7 = 4 + 4 - 1 apart need no shifting: read 8 apart, from 3 before the first, they lie so.
    """
    maps, rows, width = weights.shape
    pitch = width + rows - 1
    memory = weights.new_zeros((rows - 1) + maps * rows * pitch)
    memory[rows - 1 :].view(maps, rows, pitch)[..., :width] = weights
    aslant = memory.as_strided((maps, rows, pitch), (rows * pitch, pitch + 1, 1))
    begin = total.shape[1] // 2 - (rows - 1) + low - first
    total[:, begin : begin + pitch] += aslant.sum(1)


def _blocks(length: int, window: int | None, causal: bool, share: int, device: torch.device) -> Iterator[_Block]:
    """Blocks of queries, few enough that the scores of ``share`` heads fit in the memory of one step."""
    reach = length if window is None else window - 1
    first = 0
    while first < length:
        low = max(0, first - reach)
        width = (first + _ROWS if causal else first + _ROWS + reach) - low
        rows = max(_FEW_ROWS, min(_ROWS, _budget(device) // (share * min(width, length))))
        last = min(first + rows, length)
        yield _Block(first, last, low, last if causal else min(length, last + reach))
        first = last


def _parts(count: int, elements: int, device: torch.device) -> Iterator[slice]:
    """Slices of ``count`` maps of ``elements`` scores each that fit in the memory of one step."""
    step = max(1, _budget(device) // elements)
    for start in range(0, count, step):
        yield slice(start, start + step)


def _budget(device: torch.device) -> int:
    return _CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK


def _check(query: Tensor, key: Tensor, window: int | None) -> None:
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(
            f"query, key: expected [B, H, T, D] and [B, G, T, D], found {list(query.shape)} and {list(key.shape)}"
        )
    batch, heads, length, dim = query.shape
    if (key.shape[0], *key.shape[2:]) != (batch, length, dim):
        raise ValueError(f"key: expected [{batch}, G, {length}, {dim}] to match query, found {list(key.shape)}")
    if heads % key.shape[1]:
        raise ValueError(f"key: expected a number of heads that divides the query's {heads}, found {key.shape[1]}")
    if key.device != query.device or key.dtype != query.dtype:
        raise ValueError(
            f"key: expected the query's {query.dtype} on {query.device}, found {key.dtype} on {key.device}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1 (a query sees itself), found {window}")
