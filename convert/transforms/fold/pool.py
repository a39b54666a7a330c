"""Published ways to pool the key/value heads of each group into one; queries and output projection
are unchanged.

``mean`` is from Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from
Multi-Head Checkpoints", which also evaluates ``first`` and ``random``. Groups consist of
neighboring heads.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms.weights import AttentionWeights


def average_heads(weights: AttentionWeights, kv_heads: int) -> AttentionWeights:
    """Replace the key/value heads of each group by their mean, ``[G, D, E] -> [kv_heads, D, E]``,
    in float32 (float64 for float64 weights).

    Biases and the rows of the key norm (and its bias) are averaged too. Queries and output
    projection keep their dtype.
    """

    def average_groups(heads: Tensor) -> Tensor:
        precise = heads.to(torch.promote_types(heads.dtype, torch.float32))
        return precise.reshape(kv_heads, -1, *heads.shape[1:]).mean(1)

    return pool_heads(weights, kv_heads, average_groups)


def keep_first_heads(weights: AttentionWeights, kv_heads: int) -> AttentionWeights:
    """Replace the key/value heads of each group of neighbors by the first one, bit for bit;
    ``kv_heads`` heads remain.
    """
    size = weights.kv_heads // kv_heads
    return pool_heads(weights, kv_heads, lambda heads: heads[::size].clone())


def repeat_heads(weights: AttentionWeights, kv_heads: int) -> AttentionWeights:
    """Repeat each key/value head bit for bit, ``[G, D, E] -> [kv_heads, D, E]``; each query head
    reads a copy of the head that it read before.
    """
    times = kv_heads // weights.kv_heads
    return pool_heads(weights, kv_heads, lambda heads: heads.repeat_interleave(times, 0))


def draw_random_heads(
    weights: AttentionWeights, kv_heads: int, *, std: float, seed: int, layer: int
) -> AttentionWeights:
    """Replace keys and values by ``kv_heads`` heads drawn from a normal distribution, with zero
    biases and key norms of gain one.

    ``std`` is the initializer range in the config. The float32 result is drawn on the CPU and
    depends only on ``seed``, ``layer`` and the shape. A norm shared by all heads is kept.
    """
    pooled = pool_heads(
        weights,
        kv_heads,
        lambda heads: torch.zeros(kv_heads, *heads.shape[1:], device=heads.device),
    )
    # Draw on the CPU with a seed per layer, so results do not depend on the device or the order of
    # layers.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + layer) % 2**63)
    k, v = (
        torch.empty(pooled.k.shape).normal_(0.0, std, generator=generator).to(weights.k.device)
        for _ in range(2)
    )
    norm = pooled.k_norm
    if norm is not None and not norm.shared:
        norm = replace(norm, weight=torch.full_like(norm.weight, 1.0 - norm.offset))
    return replace(pooled, k=k, v=v, k_norm=norm)


def pool_heads(
    weights: AttentionWeights, kv_heads: int, pool: Callable[[Tensor], Tensor]
) -> AttentionWeights:
    """Return ``weights`` with the function ``pool`` (``[G, ...] -> [kv_heads, ...]``) applied to
    keys, values, their biases and the key norm.
    """
    norm = weights.k_norm
    if norm is not None:
        # A shared norm repeats one stored row: copying it is exact, while averaging might round it.
        copies = norm.shared and kv_heads <= weights.kv_heads
        norm = norm.map_tensors((lambda rows: rows[:kv_heads].clone()) if copies else pool)
    return replace(
        weights,
        k=pool(weights.k),
        v=pool(weights.v),
        k_bias=None if weights.k_bias is None else pool(weights.k_bias),
        v_bias=None if weights.v_bias is None else pool(weights.v_bias),
        k_norm=norm,
    )
