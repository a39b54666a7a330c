"""Stored tensors of a layer's attention <-> the canonical form that transforms read (``transforms/weights.py``).

Canonical weights are half-split (interleaved rotary storage is permuted on reading and back on writing) and keep the
stored dtype; reading and writing only move elements, so ``write_layer(read_layer(...))`` gives the same bits.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.families.expressions import evaluate
from kvfold.convert.families.model import Family, Geometry
from kvfold.convert.families.names import ROLES, Role, active_norm, attention_names, has_bias, kv_config, norm_names
from kvfold.convert.families.schema import Norm
from kvfold.convert.transforms.weights import AttentionWeights, HeadNorm

__all__ = ["attention_names", "kv_config", "read_layer", "write_layer"]

Read = Callable[[str], Tensor]


def read_layer(family: Family, config: Mapping[str, Any], layer: int, read: Read) -> AttentionWeights:
    """The attention of ``layer``; ``read`` gives a tensor of the checkpoint by name. Nothing is cast."""
    geometry, attention = family.geometry(config), family.spec.attention
    module = attention.module.replace("{layer}", str(layer))
    q, k, v = _read_qkv(family, geometry, module, "weight", read)
    o = read(f"{module}.{attention.o}.weight")
    o = o if attention.storage == "out_in" else o.T
    weights = AttentionWeights(q, k, v, o.reshape(geometry.model_dim, geometry.heads, geometry.head_dim))
    if has_bias(family, config, "q"):
        q_bias, k_bias, v_bias = _read_qkv(family, geometry, module, "bias", read)
        weights = replace(weights, q_bias=q_bias, k_bias=k_bias, v_bias=v_bias)
    if has_bias(family, config, "o"):
        weights = replace(weights, o_bias=read(f"{module}.{attention.o}.bias"))
    if (norm := active_norm(family, config)) is not None:
        eps = float(evaluate(norm.eps, family.values(config)))
        q_norm = _read_norm(norm, module, "q", (geometry.heads, geometry.head_dim), eps, read)
        k_norm = _read_norm(norm, module, "k", (geometry.kv_heads, geometry.head_dim), eps, read)
        weights = replace(weights, q_norm=q_norm, k_norm=k_norm)
    return _rotary_order(family, geometry, weights, _to_half)


def write_layer(
    family: Family,
    config: Mapping[str, Any],
    layer: int,
    weights: AttentionWeights,
    roles: Collection[Role] = ROLES,
) -> dict[str, Tensor]:
    """The tensors of the file that hold ``roles`` of ``layer``, by name, each contiguous, in the dtype they come in.

    The number of heads is the weights'; the rest of ``config`` may be the source's. A fused tensor is written whole
    when any of its roles is asked for. Raises ``ValueError`` when the family has no place for a bias or norm, or needs
    one.
    """
    _check_places(family, config, weights)
    geometry, attention = family.geometry(config), family.spec.attention
    module = attention.module.replace("{layer}", str(layer))
    stored = _rotary_order(family, geometry, weights, _to_interleaved)
    tensors = _join_qkv(family, module, "weight", (stored.q, stored.k, stored.v), roles)
    if stored.q_bias is not None and stored.k_bias is not None and stored.v_bias is not None:
        tensors |= _join_qkv(family, module, "bias", (stored.q_bias, stored.k_bias, stored.v_bias), roles)
    if "o" in roles:
        o = stored.o.reshape(stored.model_dim, -1)
        tensors[f"{module}.{attention.o}.weight"] = o if attention.storage == "out_in" else o.T
        if stored.o_bias is not None:
            tensors[f"{module}.{attention.o}.bias"] = stored.o_bias
    norm = active_norm(family, config)
    for role, head_norm in (("q", stored.q_norm), ("k", stored.k_norm)):
        if norm is not None and head_norm is not None and role in roles:
            tensors |= _write_norm(norm, module, role, head_norm)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _read_qkv(family: Family, geometry: Geometry, module: str, kind: str, read: Read) -> tuple[Tensor, Tensor, Tensor]:
    """The three projections (``kind`` weight or bias) as [heads, D, E] or [heads, D]."""
    attention, heads, kv_heads = family.spec.attention, geometry.heads, geometry.kv_heads

    def rows(name: str | None) -> Tensor:  # [out, E] or [out]
        tensor = read(f"{module}.{name}.{kind}")
        return tensor.T if kind == "weight" and attention.storage == "in_out" else tensor

    def split(tensor: Tensor, count: int) -> Tensor:
        return tensor.reshape(count, geometry.head_dim, *tensor.shape[1:])

    if attention.layout == "separate":
        return split(rows(attention.q), heads), split(rows(attention.k), kv_heads), split(rows(attention.v), kv_heads)
    fused = split(rows(attention.qkv), heads + 2 * kv_heads)
    if attention.layout == "concatenated":
        return fused[:heads], fused[heads : heads + kv_heads], fused[heads + kv_heads :]
    groups = fused.reshape(
        kv_heads, heads // kv_heads + 2, *fused.shape[1:]
    )  # [G, m + 2, D, ...]: m queries, key, value
    return groups[:, :-2].flatten(0, 1), groups[:, -2], groups[:, -1]


def _join_qkv(
    family: Family, module: str, kind: str, parts: tuple[Tensor, Tensor, Tensor], roles: Collection[Role]
) -> dict[str, Tensor]:
    attention = family.spec.attention

    def stored(rows: Tensor) -> Tensor:
        flat = rows.flatten(0, 1)
        return flat.T if kind == "weight" and attention.storage == "in_out" else flat

    if attention.layout == "separate":
        named = zip(("q", "k", "v"), (attention.q, attention.k, attention.v), parts, strict=True)
        return {f"{module}.{name}.{kind}": stored(part) for role, name, part in named if role in roles}
    if not {"q", "k", "v"} & set(roles):
        return {}
    q, k, v = parts
    if attention.layout == "concatenated":
        fused = torch.cat(parts)
    else:
        groups = q.reshape(k.shape[0], -1, *q.shape[1:])  # [G, m, D, ...]
        fused = torch.cat((groups, k[:, None], v[:, None]), dim=1).flatten(0, 1)
    return {f"{module}.{attention.qkv}.{kind}": stored(fused)}


def _read_norm(norm: Norm, module: str, role: str, shape: tuple[int, int], eps: float, read: Read) -> HeadNorm:
    def rows(kind: str) -> Tensor:
        stored = torch.cat([read(f"{module}.{name}.{kind}").flatten() for name in norm_names(norm, role, shape[0])])
        return stored.repeat(shape[0], 1) if norm.extent == "shared" else stored.reshape(shape)

    return HeadNorm(
        kind=norm.kind,
        weight=rows("weight"),
        bias=rows("bias") if norm.bias else None,
        eps=eps,
        offset=norm.offset,
        extent="flat" if norm.extent == "flat" else "head",
        shared=norm.extent == "shared",
    )


def _write_norm(norm: Norm, module: str, role: str, head_norm: HeadNorm) -> dict[str, Tensor]:
    tensors = {}
    for kind, rows in (("weight", head_norm.weight), ("bias", head_norm.bias)):
        if rows is None:
            continue
        if norm.extent == "shared" and not torch.equal(rows, rows[:1].expand_as(rows)):
            raise ValueError(
                f"{module}: the {role} norm is stored once for all heads, but its rows differ between heads"
            )
        parts = {"shared": (rows[0],), "flat": (rows.flatten(),), "head": (rows,), "per_head": tuple(rows)}
        for name, part in zip(norm_names(norm, role, rows.shape[0]), parts[norm.extent], strict=True):
            tensors[f"{module}.{name}.{kind}"] = part
    return tensors


def _check_places(family: Family, config: Mapping[str, Any], weights: AttentionWeights) -> None:
    norm = active_norm(family, config)
    places = {
        "q_bias": has_bias(family, config, "q"),
        "k_bias": has_bias(family, config, "k"),
        "v_bias": has_bias(family, config, "v"),
        "o_bias": has_bias(family, config, "o"),
        "q_norm": norm is not None,
        "k_norm": norm is not None,
    }
    for name, place in places.items():
        given = getattr(weights, name) is not None
        if given != place:
            wanted, found = ("needs", "none") if place else ("has no place for", "one")
            raise ValueError(f"model_type {family.model_type!r} with this config {wanted} {name}, found {found}")


def _to_half(dims: int) -> list[int]:
    return [*range(0, dims, 2), *range(1, dims, 2)]


def _to_interleaved(dims: int) -> list[int]:
    return [index for pair in zip(range(dims // 2), range(dims // 2, dims), strict=True) for index in pair]


def _rotary_order(
    family: Family, geometry: Geometry, weights: AttentionWeights, order: Callable[[int], list[int]]
) -> AttentionWeights:
    """Rows of q and k in another order of rotary dims; as they are where the family stores them half-split."""
    if family.spec.rotary.style == "half":
        return weights
    index = torch.tensor([*order(geometry.rotary_dims), *range(geometry.rotary_dims, geometry.head_dim)])

    def moved(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows.index_select(1, index.to(rows.device))

    def moved_norm(norm: HeadNorm | None) -> HeadNorm | None:
        return None if norm is None else replace(norm, weight=norm.weight[:, index], bias=moved(norm.bias))

    q, k = weights.q.index_select(1, index.to(weights.q.device)), weights.k.index_select(1, index.to(weights.k.device))
    return replace(
        weights,
        q=q,
        k=k,
        q_bias=moved(weights.q_bias),
        k_bias=moved(weights.k_bias),
        q_norm=moved_norm(weights.q_norm),
        k_norm=moved_norm(weights.k_norm),
    )
