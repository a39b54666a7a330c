"""The attention variants as the papers write them: float64, one formula a function, loops and all. Slow on purpose.

Nothing here shares code with the fast paths, which are tested against it. One sequence at a time; shapes: ``T`` query
tokens, ``S`` key tokens, ``E`` model dim, ``H`` query heads, ``G`` key/value heads, ``D`` head dim, ``Dv`` value dim,
``R`` latent rank, ``Rq`` query latent rank, ``P`` rotary dims, ``Dn`` dims of a query without rotation. Weights map
columns: ``W [D, E]`` takes ``x [E]`` to ``W x [D]``. Token-by-token versions with caches are in cached.py.

Sources: Vaswani et al. 2017 ("Attention is all you need"), Shazeer 2019 ("Fast transformer decoding"), Ainslie et al.
2023 ("GQA"), DeepSeek-AI 2024 ("DeepSeek-V2"), Su et al. 2021 ("RoFormer").
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupedWeights:
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
class LatentWeights:
    """One layer of multi-head latent attention; ``query_down`` ``None`` means no query latent (then ``Rq = E``)."""

    query_nope: Tensor  # [H, Dn, Rq], W_uq
    query_rope: Tensor  # [H, P, Rq], W_qr
    latent: Tensor  # [R, E], W_dkv
    rope_key: Tensor  # [P, E], W_kr
    up_key: Tensor  # [H, Dn, R], W_uk
    up_value: Tensor  # [H, Dv, R], W_uv
    output: Tensor  # [E, H, Dv]
    query_down: Tensor | None = None  # [Rq, E], W_dq


# The pieces


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


# The variants, from x [T, E] to y [T, E]


Rotary = Callable[[Tensor, Tensor], Tensor]  # x [T, D], positions [T] -> [T, D]


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


def multi_head_attention(
    x: Tensor, w: GroupedWeights, masks: Masks = CAUSAL, rotary: Rotary = no_rotary, scale: float | None = None
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
    x: Tensor, w: GroupedWeights, masks: Masks = CAUSAL, rotary: Rotary = no_rotary, scale: float | None = None
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
    x: Tensor, w: GroupedWeights, masks: Masks = CAUSAL, rotary: Rotary = no_rotary, scale: float | None = None
) -> Tensor:
    """``G`` keys for ``H`` heads (Ainslie 2023, 2.2); ``G = H`` is multi-head, ``G = 1`` multi-query attention."""
    places = torch.arange(len(x))
    query, key, value = project_all(x, x, w, rotary, places, places)
    return project_output(grouped_query_heads(query, key, value, masks, scale), w.output, w.output_bias)


def encoder_attention(x: Tensor, w: GroupedWeights, rotary: Rotary = no_rotary, scale: float | None = None) -> Tensor:
    """Bidirectional self-attention (Vaswani 2017, 3.2.3, encoder): nothing is masked, every token sees all."""
    return grouped_query_attention(x, w, BIDIRECTIONAL, rotary, scale)


def cross_attention(x: Tensor, memory: Tensor, w: GroupedWeights, scale: float | None = None) -> Tensor:
    """Queries from ``x [T, E]``, keys and values from the encoder's ``memory [S, E']`` (Vaswani 2017, 3.2.3)."""
    query, key, value = project_all(x, memory, w, no_rotary, torch.arange(len(x)), torch.arange(len(memory)))
    return project_output(grouped_query_heads(query, key, value, BIDIRECTIONAL, scale), w.output, w.output_bias)


def project_all(
    x: Tensor, source: Tensor, w: GroupedWeights, rotary: Rotary, places: Tensor, source_places: Tensor
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


def latent_queries(x: Tensor, w: LatentWeights, rotary: Rotary, places: Tensor) -> tuple[Tensor, Tensor]:
    """``c_q = W_dq x; q_nope,h = W_uq,h c_q; q_rope,h = RoPE(W_qr,h c_q)`` (DeepSeek-V2 2024, eq. 12-14).

    ``x [T, E]`` -> ``[H, T, Dn]``, ``[H, T, P]``.
    """
    c = x if w.query_down is None else project(x, w.query_down)
    heads = range(w.query_nope.shape[0])
    nope = torch.stack([project(c, w.query_nope[h]) for h in heads])
    rope = torch.stack([rotary(project(c, w.query_rope[h]), places) for h in heads])
    return nope, rope


def latent_keys(x: Tensor, w: LatentWeights, rotary: Rotary, places: Tensor) -> tuple[Tensor, Tensor]:
    """``c = W_dkv x; k_rope = RoPE(W_kr x)`` (eq. 9, 15): all that is cached. ``[T, R]``, ``[T, P]``."""
    return project(x, w.latent), rotary(project(x, w.rope_key), places)


def latent_heads(
    nope: Tensor, rope: Tensor, c: Tensor, rope_key: Tensor, w: LatentWeights, masks: Masks, scale: float | None
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
    nope: Tensor, rope: Tensor, c: Tensor, rope_key: Tensor, w: LatentWeights, masks: Masks, scale: float | None
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
    w: LatentWeights,
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
