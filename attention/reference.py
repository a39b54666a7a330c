"""The attention variants as written in the papers: float64, one formula per function, plain loops.
Slow on purpose.

The fast paths share no code with this module and are tested against it. Each call handles one
sequence. Shapes: ``T`` query tokens, ``S`` key tokens, ``E`` model dim, ``H`` query heads, ``G``
key/value heads, ``D`` head dim, ``Dv`` value dim, ``R`` latent rank, ``Rq`` query latent rank,
``P`` rotary dims, ``Dn`` unrotated query dims. A weight ``W [D, E]`` maps ``x [E]`` to ``W x [D]``.

Sources: Vaswani et al. 2017 ("Attention is all you need"), Shazeer 2019 ("Fast transformer
decoding"), Ainslie et al. 2023 ("GQA"), DeepSeek-AI 2024 ("DeepSeek-V2"), Su et al. 2021
("RoFormer").
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RotateHead = Callable[[Tensor, Tensor], Tensor]  # x [T, D], positions [T] -> [T, D]


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Return the queries, keys or values of one head, ``[T, D]``: ``q_t = W x_t`` (Vaswani 2017,
    3.2.2).

    ``x [T, E]``, ``weight [D, E]`` -> ``[T, D]``.
    """
    return torch.stack([weight @ token for token in x])


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, interleaved: bool = False) -> Tensor:
    """Apply the rotary embedding (Su 2021, eq. 14-15): rotate pair ``l`` by the angle ``t
    theta_l``.

        x'_a = x_a cos(t theta_l) - x_b sin(t theta_l),    x'_b = x_a sin(t theta_l) + x_b cos(t
        theta_l)

    Pair ``l`` is ``(a, b) = (2 l, 2 l + 1)`` if interleaved, else ``(l, l + Dr / 2)``; dims from
    ``Dr`` on are unchanged. ``x [T, D]``, ``positions [T]``, ``frequencies [Dr / 2]`` -> ``[T,
    D]``.
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


def project_heads(
    x: Tensor, weight: Tensor, bias: Tensor | None, rotary: RotateHead | None = None
) -> Tensor:
    """Return the rotated projections of all heads, ``W x_t + b``, ``[H, T, D]``, for ``weight [H,
    D, E]`` and ``bias [H, D]``.
    """
    heads = torch.stack([project(x, w) for w in weight])
    if bias is not None:
        heads = heads + bias[:, None]
    if rotary is not None:
        heads = torch.stack([rotary(head, torch.arange(len(x))) for head in heads])
    return heads


def project_output(heads: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``y_t = sum_h W_o,h z_h,t + b``, ``[T, E]``, from ``heads [H, T, Dv]``, ``weight [E,
    H, Dv]`` and ``bias [E]``.

    Same as Vaswani's ``Concat(z_1 .. z_H) W_o``, with the product written as a sum over heads.
    """
    result = []
    for token in range(heads.shape[1]):
        y = torch.stack([w @ z[token] for w, z in zip(weight.unbind(1), heads, strict=True)]).sum(0)
        result.append(y if bias is None else y + bias)
    return torch.stack(result)


@dataclass(frozen=True)
class MaskSettings:
    """Which keys the queries of one sequence see: causality, offset, window and padding."""

    causal: bool = True
    offset: int = 0  # tokens before query 0
    window: int | None = None
    start: int = 0
    length: int | None = None

    def hide_keys(self, score: Tensor) -> Tensor:
        """Return ``score [T, S]`` of one head with ``-inf`` where query ``i`` does not see key
        ``j``.
        """
        distance = (
            torch.arange(score.shape[0])[:, None] + self.offset - torch.arange(score.shape[1])
        )
        keys = torch.arange(score.shape[1])
        # decoders: nothing later than the query (Vaswani 2017, 3.2.3)
        hidden = (distance < 0) & self.causal
        if self.window is not None:
            # Beltagy et al. 2020, "Longformer"
            hidden |= distance.abs() >= self.window
        hidden |= (keys < self.start) | (
            keys >= (score.shape[1] if self.length is None else self.length)
        )
        return score.masked_fill(hidden, -torch.inf)


CAUSAL = MaskSettings()


def attend_one_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: MaskSettings,
    scale: float | None = None,
) -> Tensor:
    """Return scaled dot-product attention of one head, ``softmax(mask(q k^T / sqrt(d_head))) v``
    (Vaswani 2017, 3.2.1).

        s_ij = q_i . k_j / sqrt(d_head),    a_ij = exp(s_ij) / sum_j exp(s_ij),    z_i = sum_j a_ij
        v_j

    ``query [T, D]``, ``key [S, D]``, ``value [S, Dv]`` -> ``[T, Dv]``; a query that sees no key
    gets zeros.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.stack([torch.stack([factor * (q * k).sum() for k in key]) for q in query])
    result = []
    for row in masks.hide_keys(scores):
        if bool((row == -torch.inf).all()):
            result.append(torch.zeros_like(value[0]))
            continue
        # a common factor of all powers cancels; without it they would overflow
        powers = torch.exp(row - row.detach().max())
        weights = powers / powers.sum()
        result.append(sum(a * v for a, v in zip(weights, value, strict=True)))
    return torch.stack(result)


@dataclass(frozen=True)
class GroupedProjections:
    """Projections of one MHA (``G = H``), GQA or MQA (``G = 1``) layer; biases may be None."""

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
    """Projections of one MLA layer; ``query_down=None`` means that there is no query latent (then
    ``Rq = E``).
    """

    query_nope: Tensor  # [H, Dn, Rq], W_uq
    query_rope: Tensor  # [H, P, Rq], W_qr
    latent: Tensor  # [R, E], W_dkv
    rope_key: Tensor  # [P, E], W_kr
    up_key: Tensor  # [H, Dn, R], W_uk
    up_value: Tensor  # [H, Dv, R], W_uv
    output: Tensor  # [E, H, Dv]
    query_down: Tensor | None = None  # [Rq, E], W_dq


def grouped_query_attention(
    x: Tensor, w: GroupedProjections, rotary: RotateHead | None = None
) -> Tensor:
    """Return grouped-query attention ``[T, E]``: ``y = sum_h W_o,h attention(W_q,h x, W_k,g x,
    W_v,g x) + b``, with head ``h`` in group ``g``.

    ``G`` key heads serve ``H`` query heads (Ainslie 2023, 2.2): ``G = H`` is multi-head (Vaswani
    2017, 3.2.2), ``G = 1`` multi-query attention (Shazeer 2019, sec. 3).
    """
    query = project_heads(x, w.query, w.query_bias, rotary)
    key = project_heads(x, w.key, w.key_bias, rotary)
    value = project_heads(x, w.value, w.value_bias)
    return project_output(attend_grouped_heads(query, key, value, CAUSAL), w.output, w.output_bias)


def attend_grouped_heads(query: Tensor, key: Tensor, value: Tensor, masks: MaskSettings) -> Tensor:
    """Return the attention outputs of all heads, ``[H, T, Dv]``, for ``query [H, T, D]``, ``key [G,
    S, D]`` and ``value [G, S, Dv]``.

    Query head ``h`` uses key head ``h // (H / G)``.
    """
    share = query.shape[0] // key.shape[0]
    return torch.stack(
        [attend_one_head(q, key[h // share], value[h // share], masks) for h, q in enumerate(query)]
    )


def attend_latent_heads(
    nope: Tensor,
    rope: Tensor,
    c: Tensor,
    rope_key: Tensor,
    w: LatentProjections,
    masks: MaskSettings,
    absorbed: bool = False,
) -> Tensor:
    """Return the outputs of all heads of latent attention, ``[H, T, Dv]``: ``attention([q_nope,h;
    q_rope,h], [W_uk,h c; k_rope], W_uv,h c)`` (eq. 10-11, 16-18).

    ``nope [H, T, Dn]``, ``rope [H, T, P]``, ``c [S, R]``, ``rope_key [S, P]`` -> ``[H, T, Dv]``.
    ``absorbed`` never computes the keys or values of a head (sec. 2.1.2).
    """
    scale = (nope.shape[-1] + rope.shape[-1]) ** -0.5
    heads = []
    for h in range(len(nope)):
        if absorbed:
            # q_nope . W_uk c = (W_uk^T q_nope) . c  and  sum_s a_s W_uv c_s = W_uv sum_s a_s c_s
            query = project(nope[h], w.up_key[h].T)
            key = c
            value = c
        else:
            query = nope[h]
            key = project(c, w.up_key[h])
            value = project(c, w.up_value[h])
        z = attend_one_head(
            torch.cat([query, rope[h]], -1),
            torch.cat([key, rope_key], -1),
            value,
            masks,
            scale,
        )
        heads.append(project(z, w.up_value[h]) if absorbed else z)
    return torch.stack(heads)


def latent_attention(
    x: Tensor, w: LatentProjections, rotary: RotateHead, absorbed: bool = False
) -> Tensor:
    """Return multi-head latent attention (DeepSeek-V2 2024, sec. 2.1), ``[T, E]``, for ``x [T,
    E]``.

    c_q = W_dq x,    q_nope,h = W_uq,h c_q,    q_rope,h = RoPE(W_qr,h c_q)    (eq. 12-14) c = W_dkv
    x,     k_rope = RoPE(W_kr x)                                    (eq. 9, 15); only these two are
    cached
    """
    c_q = x if w.query_down is None else project(x, w.query_down)
    nope = project_heads(c_q, w.query_nope, None)
    rope = project_heads(c_q, w.query_rope, None, rotary)
    c = project(x, w.latent)
    rope_key = rotary(project(x, w.rope_key), torch.arange(len(x)))
    return project_output(
        attend_latent_heads(nope, rope, c, rope_key, w, CAUSAL, absorbed), w.output
    )
