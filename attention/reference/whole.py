"""The attention variants as the papers write them: float64, one formula a function, loops and all. Slow on purpose.

Nothing here shares code with the fast paths, which are tested against it. One sequence at a time; shapes: ``T`` query
tokens, ``S`` key tokens, ``E`` model dim, ``H`` query heads, ``G`` key/value heads, ``D`` head dim, ``Dv`` value dim,
``R`` latent rank, ``Rq`` query latent rank, ``P`` rotary dims, ``Dn`` dims of a query without rotation. Weights map
columns: ``W [D, E]`` takes ``x [E]`` to ``W x [D]``. The pieces are in pieces.py, the versions
that take one token at a time in cached.py.

Sources: Vaswani et al. 2017 ("Attention is all you need"), Shazeer 2019 ("Fast transformer decoding"), Ainslie et al.
2023 ("GQA"), DeepSeek-AI 2024 ("DeepSeek-V2"), Su et al. 2021 ("RoFormer").
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attention.reference.pieces import (
    BIDIRECTIONAL,
    CAUSAL,
    Masks,
    Rotary,
    attention,
    no_rotary,
    project,
    project_head,
    project_output,
)


@dataclass(frozen=True)
class GroupedProjections:
    """One layer of MHA (``G = H``), GQA or MQA (``G = 1``); biases may be ``None``."""

    query: Tensor  # [H, D, E]
    key: Tensor  # [G, D, E]
    value: Tensor  # [G, Dv, E]
    output: Tensor  # [E, H, Dv]
    query_bias: Tensor | None = None  # [H, D]
    key_bias: Tensor | None = None  # [G, D]
    value_bias: Tensor | None = None  # [G, Dv]
    output_bias: Tensor | None = None  # [E]


@dataclass(frozen=True)
class LatentProjections:
    """One layer of multi-head latent attention; ``query_down`` ``None`` means no query latent (then ``Rq = E``)."""

    query_nope: Tensor  # [H, Dn, Rq], W_uq
    query_rope: Tensor  # [H, P, Rq], W_qr
    latent: Tensor  # [R, E], W_dkv
    rope_key: Tensor  # [P, E], W_kr
    up_key: Tensor  # [H, Dn, R], W_uk
    up_value: Tensor  # [H, Dv, R], W_uv
    output: Tensor  # [E, H, Dv]
    query_down: Tensor | None = None  # [Rq, E], W_dq


def multi_head_attention(
    x: Tensor, w: GroupedProjections, masks: Masks = CAUSAL, rotary: Rotary = no_rotary, scale: float | None = None
) -> Tensor:
    """``y = sum_h W_o,h attention(W_q,h x, W_k,h x, W_v,h x) + b`` (Vaswani 2017, 3.2.2): every head its own key."""
    places, heads = torch.arange(len(x)), []
    for h in range(w.query.shape[0]):
        query = project_head(x, w.query, w.query_bias, h, rotary, places)
        key = project_head(x, w.key, w.key_bias, h, rotary, places)
        value = project_head(x, w.value, w.value_bias, h, no_rotary, places)
        heads.append(attention(query, key, value, masks, h, scale))
    return project_output(torch.stack(heads), w.output, w.output_bias)


def multi_query_attention(
    x: Tensor, w: GroupedProjections, masks: Masks = CAUSAL, rotary: Rotary = no_rotary, scale: float | None = None
) -> Tensor:
    """``y = sum_h W_o,h attention(W_q,h x, W_k x, W_v x) + b`` (Shazeer 2019, sec. 3): one key for all heads."""
    places, heads = torch.arange(len(x)), []
    key = project_head(x, w.key, w.key_bias, 0, rotary, places)
    value = project_head(x, w.value, w.value_bias, 0, no_rotary, places)
    for h in range(w.query.shape[0]):
        query = project_head(x, w.query, w.query_bias, h, rotary, places)
        heads.append(attention(query, key, value, masks, h, scale))
    return project_output(torch.stack(heads), w.output, w.output_bias)


def grouped_query_attention(
    x: Tensor, w: GroupedProjections, masks: Masks = CAUSAL, rotary: Rotary = no_rotary, scale: float | None = None
) -> Tensor:
    """``G`` keys for ``H`` heads (Ainslie 2023, 2.2); ``G = H`` is multi-head, ``G = 1`` multi-query attention."""
    places = torch.arange(len(x))
    query, key, value = project_all(x, x, w, rotary, places, places)
    return project_output(grouped_query_heads(query, key, value, masks, scale), w.output, w.output_bias)


def encoder_attention(
    x: Tensor, w: GroupedProjections, rotary: Rotary = no_rotary, scale: float | None = None
) -> Tensor:
    """Bidirectional self-attention (Vaswani 2017, 3.2.3, encoder): nothing is masked, every token sees all."""
    return grouped_query_attention(x, w, BIDIRECTIONAL, rotary, scale)


def cross_attention(x: Tensor, memory: Tensor, w: GroupedProjections, scale: float | None = None) -> Tensor:
    """Queries from ``x [T, E]``, keys and values from the encoder's ``memory [S, E']`` (Vaswani 2017, 3.2.3)."""
    query, key, value = project_all(x, memory, w, no_rotary, torch.arange(len(x)), torch.arange(len(memory)))
    return project_output(grouped_query_heads(query, key, value, BIDIRECTIONAL, scale), w.output, w.output_bias)


def project_all(
    x: Tensor, source: Tensor, w: GroupedProjections, rotary: Rotary, places: Tensor, source_places: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """All heads: ``query [H, T, D]`` from ``x``, ``key [G, S, D]`` and ``value [G, S, Dv]`` from ``source``."""
    heads, groups = range(w.query.shape[0]), range(w.key.shape[0])
    query = torch.stack([project_head(x, w.query, w.query_bias, h, rotary, places) for h in heads])
    key = torch.stack([project_head(source, w.key, w.key_bias, g, rotary, source_places) for g in groups])
    value = torch.stack([project_head(source, w.value, w.value_bias, g, no_rotary, source_places) for g in groups])
    return query, key, value


def grouped_query_heads(
    query: Tensor, key: Tensor, value: Tensor, masks: Masks = CAUSAL, scale: float | None = None
) -> Tensor:
    """Query head ``h`` reads key/value head ``h // (H / G)``.

    ``query [H, T, D]``, ``key [G, S, D]``, ``value [G, S, Dv]`` -> ``[H, T, Dv]``.
    """
    share = query.shape[0] // key.shape[0]
    heads = [attention(q, key[h // share], value[h // share], masks, h, scale) for h, q in enumerate(query)]
    return torch.stack(heads)


def latent_queries(x: Tensor, w: LatentProjections, rotary: Rotary, places: Tensor) -> tuple[Tensor, Tensor]:
    """``c_q = W_dq x; q_nope,h = W_uq,h c_q; q_rope,h = RoPE(W_qr,h c_q)`` (DeepSeek-V2 2024, eq. 12-14).

    ``x [T, E]`` -> ``[H, T, Dn]``, ``[H, T, P]``.
    """
    c = x if w.query_down is None else project(x, w.query_down)
    heads = range(w.query_nope.shape[0])
    nope = torch.stack([project(c, w.query_nope[h]) for h in heads])
    rope = torch.stack([rotary(project(c, w.query_rope[h]), places) for h in heads])
    return nope, rope


def latent_keys(x: Tensor, w: LatentProjections, rotary: Rotary, places: Tensor) -> tuple[Tensor, Tensor]:
    """``c = W_dkv x; k_rope = RoPE(W_kr x)`` (eq. 9, 15): all that is cached. ``[T, R]``, ``[T, P]``."""
    return project(x, w.latent), rotary(project(x, w.rope_key), places)


def latent_heads(
    nope: Tensor, rope: Tensor, c: Tensor, rope_key: Tensor, w: LatentProjections, masks: Masks, scale: float | None
) -> Tensor:
    """``k_h = [W_uk,h c; k_rope]; v_h = W_uv,h c; z_h = attention([q_nope,h; q_rope,h], k_h, v_h)`` (eq. 10-11, 16-18).

    ``nope [H, T, Dn]``, ``rope [H, T, P]``, ``c [S, R]``, ``rope_key [S, P]`` -> ``[H, T, Dv]``.
    """
    heads = []
    for h in range(len(nope)):
        query = torch.cat([nope[h], rope[h]], -1)
        key = torch.cat([project(c, w.up_key[h]), rope_key], -1)
        heads.append(attention(query, key, project(c, w.up_value[h]), masks, h, scale))
    return torch.stack(heads)


def absorbed_heads(
    nope: Tensor, rope: Tensor, c: Tensor, rope_key: Tensor, w: LatentProjections, masks: Masks, scale: float | None
) -> Tensor:
    """``q_nope . W_uk c = (W_uk^T q_nope) . c`` and ``sum_s a_s W_uv c_s = W_uv sum_s a_s c_s`` (sec. 2.1.2).

    No key and no value of any head is made; shapes as in ``latent_heads``.
    """
    scale = (nope.shape[-1] + rope.shape[-1]) ** -0.5 if scale is None else scale
    heads = []
    for h in range(len(nope)):
        query = torch.cat([project(nope[h], w.up_key[h].T), rope[h]], -1)
        z = attention(query, torch.cat([c, rope_key], -1), c, masks, h, scale)
        heads.append(project(z, w.up_value[h]))
    return torch.stack(heads)


def latent_attention(
    x: Tensor,
    w: LatentProjections,
    rotary: Rotary,
    masks: Masks = CAUSAL,
    scale: float | None = None,
    absorbed: bool = False,
) -> Tensor:
    """Multi-head latent attention (DeepSeek-V2 2024, sec. 2.1): ``x [T, E]`` -> ``[T, E]``."""
    places = torch.arange(len(x))
    heads = absorbed_heads if absorbed else latent_heads
    z = heads(*latent_queries(x, w, rotary, places), *latent_keys(x, w, rotary, places), w, masks, scale)
    return project_output(z, w.output)
