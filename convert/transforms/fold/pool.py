"""The published ways to share heads: each group of key/value heads becomes one, queries and output stay as they are.

``mean``: Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
which also compares ``first`` and ``random``. Groups are neighboring heads, as every stock class expects.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvfold.convert.transforms.weights import AttentionWeights


def mean(weights: AttentionWeights, kv_heads: int) -> AttentionWeights:
    """Every group's heads averaged, ``[G, D, E] -> [kv_heads, D, E]``, in float32 (float64 for float64 weights).

    Biases and the key norm's rows (and its bias) are averaged likewise. Queries and output keep their dtype.
    Raises ``ValueError`` when ``kv_heads`` does not divide ``G``.
    """

    def average(heads: Tensor) -> Tensor:
        precise = heads.to(torch.promote_types(heads.dtype, torch.float32))
        return precise.reshape(kv_heads, -1, *heads.shape[1:]).mean(1)

    return _pooled(weights, kv_heads, average)


def first(weights: AttentionWeights, kv_heads: int) -> AttentionWeights:
    """The first head of every group, bit for bit. Raises ``ValueError`` as ``mean`` does."""
    size = weights.kv_heads // max(kv_heads, 1)
    return _pooled(weights, kv_heads, lambda heads: heads[::size].clone())


def random(weights: AttentionWeights, kv_heads: int, *, std: float, seed: int, layer: int) -> AttentionWeights:
    """Random keys and values: normal with ``std`` (the config's initializer range), biases zero, the norm's gain one.

    float32, drawn on the CPU, the same for the same ``seed``, ``layer`` and shape. A norm that the file stores once
    for all heads is kept. Raises ``ValueError`` as ``mean`` does.
    """
    pooled = _pooled(weights, kv_heads, lambda heads: torch.zeros(kv_heads, *heads.shape[1:], device=heads.device))
    # Drawn on the CPU and by layer: the same on every device and in every order of layers.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + layer) % 2**63)
    k, v = (torch.empty(pooled.k.shape).normal_(0.0, std, generator=generator).to(weights.k.device) for _ in range(2))
    norm = pooled.k_norm
    if norm is not None and not norm.shared:
        norm = replace(norm, weight=torch.full_like(norm.weight, 1.0 - norm.offset))
    return replace(pooled, k=k, v=v, k_norm=norm)


def _pooled(weights: AttentionWeights, kv_heads: int, pool: Callable[[Tensor], Tensor]) -> AttentionWeights:
    """Keys, values, their biases and the key norm pooled from ``[G, ...]`` to ``[kv_heads, ...]``."""
    if kv_heads < 1 or weights.kv_heads % kv_heads:
        raise ValueError(f"kv_heads: {kv_heads} must divide the {weights.kv_heads} key/value heads")
    norm = weights.k_norm
    if norm is not None:
        # A shared norm repeats one stored row: taking that row keeps its bits, which an average might not.
        norm = norm.map((lambda rows: rows[:kv_heads].clone()) if norm.shared else pool)
    return replace(
        weights,
        k=pool(weights.k),
        v=pool(weights.v),
        k_bias=None if weights.k_bias is None else pool(weights.k_bias),
        v_bias=None if weights.v_bias is None else pool(weights.v_bias),
        k_norm=norm,
    )
