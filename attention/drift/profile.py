"""Attention weight by distance, without storing a whole attention map.

Shapes: ``B`` sequences, ``H`` query heads, ``G`` key heads (``H`` is a multiple of ``G``; head
``h`` uses key head ``h // (H // G)``), ``T`` positions, ``D`` head dim. Rows of the map are
queries, computed in blocks, so that memory is ``O(T)`` instead of ``O(T^2)``. Arithmetic is float32
(float64 for float64 inputs); sums are float64.
"""

import torch
from torch import Tensor

from kvfold.attention.blocked import AttentionScores
from kvfold.attention.mask import Visibility


@torch.no_grad()
def sum_attention_by_distance_and_key(
    query: Tensor,
    key: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return how much attention each head pays at each distance, ``[H, T]``, and how much each key
    receives, ``[B, T]``; both float64.

    For the attention weights ``a`` of ``query [B, H, T, D]`` on ``key [B, G, T, D]``,

        p_h(delta) = 1 / (B T) * sum over b, s of a[b, h, s, s - delta]
        r_b(s)     = 1 / H * sum over h, t of a[b, h, t, s]

    so each row of ``p`` sums to 1 and each row of ``r`` to ``T``. ``window`` is the number of keys
    that a query sees, including its own; ``softcap`` is Gemma 2's. ``sinks [H]`` are the scores of
    an additional key without a value (gpt-oss): neither result includes its share of each row, and
    ``p`` is rescaled to sum to 1.
    """
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = torch.unflatten(query.to(wide), 1, (groups, -1))
    rule = Visibility(window=window)
    scores = AttentionScores((grouped,), (key.to(wide),), scale, rule, softcap=softcap, sinks=sinks)
    total = query.new_zeros(batch, groups, heads // groups, 2 * length, dtype=torch.float64)
    received = query.new_zeros(batch, groups, length, dtype=torch.float64)
    for block in scores.split_into_blocks(buffers=2):
        weights = scores.compute_weights(block)
        # rows of a block are consecutive queries of one head, so that distances lie on diagonals
        maps = weights.view(-1, *block.shape[-2:])
        sums = total[block.batch, block.groups].view(len(maps), -1)
        add_attention_by_distance(maps, block.queries.start, block.keys.start, sums)
        part = received[block.batch, block.groups, block.keys]
        part += weights.sum(1).view(part.shape)
    # column T holds distance 0, columns before it the keys behind a query
    folded = total[..., 1 : length + 1].flip(-1)
    profile = folded.flatten(1, 2).sum(0)
    return profile / profile.sum(-1, keepdim=True), received.sum(1) / heads


def add_attention_by_distance(
    weights: Tensor, first_query: int, first_key: int, total: Tensor
) -> None:
    """Add a block of attention ``weights [maps, rows, width]`` to ``total [maps, 2T]``, whose
    column ``T + d`` sums the pairs with ``key - query = d``.

    ``weights [maps, rows, width]`` are for queries ``first_query ..`` and keys
    ``first_key ..``. Equal distances lie on a diagonal. If each row is shifted one column further
    right than the row below it, with zeros around it, each diagonal becomes a column. For 4 queries
    ``a .. d`` and 4 keys, with ``b0`` the second query's weight on the first key::

        a0 a1 a2 a3        .  .  .  a0 a1 a2 a3
        b0 b1 b2 b3   ->   .  .  b0 b1 b2 b3 .
        c0 c1 c2 c3        .  c0 c1 c2 c3 .  .
        d0 d1 d2 d3        d0 d1 d2 d3 .  .  .
                          -3 -2 -1  0  1  2  3  + first_key - first_query

    Shifting needs no copy: rows stored 7 = 4 + 4 - 1 apart are read 8 apart, starting 3 before the
    first row.
    """
    maps, rows, width = weights.shape
    pitch = width + rows - 1
    padded = weights.new_zeros((rows - 1) + maps * rows * pitch)
    padded[rows - 1 :].view(maps, rows, pitch)[..., :width] = weights
    aslant = padded.as_strided((maps, rows, pitch), (rows * pitch, pitch + 1, 1))
    begin = total.shape[1] // 2 - (rows - 1) + first_key - first_query
    total[:, begin : begin + pitch] += aslant.sum(1)
