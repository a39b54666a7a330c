"""The attention variants as written in the papers: float64, one formula per function, plain loops.
Slow on purpose.

The fast paths share no code with this module and are tested against it. Each call handles one
sequence; shapes as in attention/README.md, ``Rq`` is the rank of a query latent.

Sources: Vaswani et al. 2017 ("Attention is all you need"), Shazeer 2019 ("Fast transformer
decoding"), Ainslie et al. 2023 ("GQA"), DeepSeek-AI 2024 ("DeepSeek-V2"), Su et al. 2021
("RoFormer").
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kvfold.attention import GroupedAttention, LatentAttention

RotateHead = Callable[[Tensor, Tensor], Tensor]  # x [T, D], positions [T] -> [T, D]


def project(x: Tensor, weight: Tensor) -> Tensor:
    """The queries, keys or values of one head, ``q_t = W x_t`` (Vaswani 2017, 3.2.2): ``[T, D]``
    from ``x [T, E]`` and ``weight [D, E]``.
    """
    return torch.stack([weight @ token for token in x])


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, interleaved: bool = False) -> Tensor:
    """``x [T, D]`` with pair ``l`` rotated by the angle ``t theta_l`` (Su 2021, eq. 14-15), for
    ``positions [T]`` and ``frequencies [Dr / 2]``:

        x'_a = x_a cos(t theta_l) - x_b sin(t theta_l),
        x'_b = x_a sin(t theta_l) + x_b cos(t theta_l)

    Pair ``l`` is ``(a, b) = (2 l, 2 l + 1)`` if interleaved, else ``(l, l + Dr / 2)``; dims from
    ``Dr`` on are unchanged.
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


def attend_one_head(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Scaled dot-product attention of one head (Vaswani 2017, 3.2.1), over the keys that each query
    sees, ``seen [T, S]``:

        s_ij = q_i . k_j / sqrt(d_head),  a_ij = exp(s_ij) / sum_j exp(s_ij),  z_i = sum_j a_ij v_j

    ``query [T, D]``, ``key [S, D]``, ``value [S, Dv]`` -> ``[T, Dv]``; a query that sees no key
    gets zeros.
    """
    result = []
    for q, visible in zip(query, seen, strict=True):
        scores = torch.stack([(q * k).sum() / len(q) ** 0.5 for k in key])[visible]
        # a common factor of all powers cancels; without it they would overflow
        powers = torch.exp(scores - scores.detach().max()) if len(scores) else scores
        weights = powers / powers.sum()
        z = torch.zeros_like(value[0])
        for a, v in zip(weights, value[visible], strict=True):
            z = z + a * v
        result.append(z)
    return torch.stack(result)


def attend_grouped_heads(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """The outputs of all heads, ``[H, T, Dv]``, for ``query [H, T, D]``, ``key [G, S, D]`` and
    ``value [G, S, Dv]``: query head ``h`` uses key head ``h // (H / G)`` (Ainslie 2023, 2.2).
    """
    share = len(query) // len(key)
    heads = [(q, key[h // share], value[h // share]) for h, q in enumerate(query)]
    return torch.stack([attend_one_head(*head, seen) for head in heads])


def split_heads(weight: Tensor, heads: int) -> Tensor:
    """A projection's weight ``[H D, E]`` or bias ``[H D]`` by head: ``[H, D, E]`` or ``[H, D]``."""
    return weight.unflatten(0, (heads, -1))


def project_heads(x: Tensor, linear: nn.Module, heads: int) -> Tensor:
    """The projections of all heads, ``W_h x_t + b_h``: ``[H, T, D]``."""
    projected = torch.stack([project(x, weight) for weight in split_heads(linear.weight, heads)])
    return (
        projected if linear.bias is None else projected + split_heads(linear.bias, heads)[:, None]
    )


def project_output(z: Tensor, linear: nn.Module) -> Tensor:
    """``y_t = sum_h W_o,h z_h,t + b``, ``[T, E]``, from ``z [H, T, Dv]``: Vaswani's ``Concat(z_1 ..
    z_H) W_o``, with the product written as a sum over heads.
    """
    weights = linear.weight.unflatten(1, (len(z), -1)).unbind(1)
    y = sum(project(head, weight) for head, weight in zip(z, weights, strict=True))
    return y if linear.bias is None else y + linear.bias


def see_causally(length: int) -> Tensor:
    """``[T, T]``: decoders see nothing later than the query (Vaswani 2017, 3.2.3)."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def grouped_query_attention(x: Tensor, layer: GroupedAttention, rotary: RotateHead) -> Tensor:
    """``y = sum_h W_o,h attention(W_q,h x, W_k,g x, W_v,g x) + b``, ``[T, E]``, with head ``h`` in
    group ``g``.

    ``G`` key heads serve ``H`` query heads (Ainslie 2023, 2.2): ``G = H`` is multi-head (Vaswani
    2017, 3.2.2), ``G = 1`` multi-query attention (Shazeer 2019, sec. 3).
    """
    positions = torch.arange(len(x))
    query = project_heads(x, layer.query, layer.heads)
    key = project_heads(x, layer.key, layer.kv_heads)
    value = project_heads(x, layer.value, layer.kv_heads)
    query, key = (torch.stack([rotary(head, positions) for head in side]) for side in (query, key))
    return project_output(
        attend_grouped_heads(query, key, value, see_causally(len(x))), layer.output
    )


def latent_attention(x: Tensor, layer: LatentAttention, rotary: RotateHead) -> Tensor:
    """Multi-head latent attention (DeepSeek-V2 2024, sec. 2.1), ``[T, E]``, for ``x [T, E]``:

    c_q = W_dq x,   q_nope,h = W_uq,h c_q,   q_rope,h = RoPE(W_qr,h c_q)          (eq. 12-14)
    c = W_dkv x,    k_rope = RoPE(W_kr x)           (eq. 9, 15); only these two are cached
    z_h = attention([q_nope,h; q_rope,h], [W_uk,h c; k_rope], W_uv,h c)    (eq. 10-11, 16-18)
    """
    positions = torch.arange(len(x))
    query = layer.query
    c_q = x
    if isinstance(query, nn.Sequential):
        c_q = project(x, query[0].weight)
        query = query[1]
    c = project(x, layer.down.weight[: layer.kv_rank])
    rope_key = rotary(project(x, layer.down.weight[layer.kv_rank :]), positions)
    heads = []
    for q, up in zip(
        project_heads(c_q, query, layer.heads),
        split_heads(layer.up.weight, layer.heads),
        strict=True,
    ):
        rope = rotary(q[:, layer.nope_dim :], positions)
        key = torch.cat([project(c, up[: layer.nope_dim]), rope_key], -1)
        value = project(c, up[layer.nope_dim :])
        q = torch.cat([q[:, : layer.nope_dim], rope], -1)
        heads.append(attend_one_head(q, key, value, see_causally(len(x))))
    return project_output(torch.stack(heads), layer.output)
