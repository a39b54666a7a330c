"""The same variants one token at a time: what a decoder keeps between steps, and what it computes from it.

Each ``*_step`` takes the new token ``x [E]`` and a cache, a plain list with one entry per earlier token, appends what
the variant caches of ``x``, and gives ``y [E]``. A sequence fed step by step must give what whole.py computes for all
of it at once. Shapes and sources as there; the entries per token are

    grouped-query   keys [G, D], values [G, Dv]     2 G D elements (G = H: multi-head, G = 1: multi-query)
    latent          c [R], k_rope [P]               R + P elements
    cross           nothing per step: the memory's keys [G, S, D] and values [G, S, Dv], once
"""

import torch
from torch import Tensor

from kvfold.attention.reference.pieces import BIDIRECTIONAL, Rotary, no_rotary, project_head, project_output
from kvfold.attention.reference.whole import (
    GroupedProjections,
    LatentProjections,
    absorbed_heads,
    grouped_query_heads,
    latent_heads,
    latent_keys,
    latent_queries,
    project_all,
)

Cache = list[tuple[Tensor, Tensor]]


def grouped_query_step(
    x: Tensor, cache: Cache, w: GroupedProjections, rotary: Rotary = no_rotary, scale: float | None = None
) -> Tensor:
    """Causal self-attention of the newest token on all tokens so far: nothing later is there to be masked."""
    here = torch.tensor([len(cache)])
    query, key, value = project_all(x[None], x[None], w, rotary, here, here)
    cache.append((key[:, 0], value[:, 0]))
    keys = torch.stack([key for key, _ in cache], 1)  # [G, S, D]
    values = torch.stack([value for _, value in cache], 1)
    z = grouped_query_heads(query, keys, values, BIDIRECTIONAL, scale)
    return project_output(z, w.output, w.output_bias)[0]


def latent_step(
    x: Tensor, cache: Cache, w: LatentProjections, rotary: Rotary, scale: float | None = None, absorbed: bool = False
) -> Tensor:
    """Latent attention of the newest token; explicit: every cached latent is expanded again, absorbed: none is."""
    here = torch.tensor([len(cache)])
    c, rope_key = latent_keys(x[None], w, rotary, here)
    cache.append((c[0], rope_key[0]))
    heads = absorbed_heads if absorbed else latent_heads
    latents = torch.stack([c for c, _ in cache])  # [S, R]
    rope_keys = torch.stack([rope_key for _, rope_key in cache])
    z = heads(*latent_queries(x[None], w, rotary, here), latents, rope_keys, w, BIDIRECTIONAL, scale)
    return project_output(z, w.output)[0]


def cross_cache(memory: Tensor, w: GroupedProjections) -> tuple[Tensor, Tensor]:
    """The cache of cross attention, from ``memory [S, E']``: ``[G, S, D]`` and ``[G, S, Dv]``."""
    places, groups = torch.arange(len(memory)), range(w.key.shape[0])
    key = torch.stack([project_head(memory, w.key, w.key_bias, g, no_rotary, places) for g in groups])
    value = torch.stack([project_head(memory, w.value, w.value_bias, g, no_rotary, places) for g in groups])
    return key, value


def cross_step(x: Tensor, cache: tuple[Tensor, Tensor], w: GroupedProjections, scale: float | None = None) -> Tensor:
    """Cross attention of one token ``x [E]`` on a memory whose keys and values were made before."""
    heads = range(w.query.shape[0])
    here = torch.arange(1)
    query = torch.stack([project_head(x[None], w.query, w.query_bias, h, no_rotary, here) for h in heads])
    z = grouped_query_heads(query, *cache, BIDIRECTIONAL, scale)
    return project_output(z, w.output, w.output_bias)[0]
