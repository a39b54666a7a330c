"""Conversion of a layer's attention between stored tensors and canonical weights
(``transforms/weights.py``).

Canonical weights are half-split (interleaved rotary dims are permuted on reading and back on
writing) and keep the stored dtype. Reading and writing only move elements, so
``write_layer(read_layer(...))`` reproduces the same bits.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import ContextRange
from kvfold.convert.families.schema import ROLES, Norm, Role
from kvfold.convert.families.values import evaluate
from kvfold.convert.transforms.weights import AttentionWeights, HeadNorm, Rotary

Read = Callable[[str], Tensor]


def layer_rotary(model: Model, layer: int, context: ContextRange | None = None) -> Rotary:
    """The rotary embedding of ``layer``, empty if it does not rotate. ``context`` is as in
    ``Model.frequencies``.
    """
    theta, amplitude = model.frequencies(layer, context)
    return Rotary(torch.tensor(theta, dtype=torch.float64), amplitude)


def read_layer(model: Model, layer: int, read: Read) -> AttentionWeights:
    """The attention weights of ``layer`` in their stored dtype. ``read`` returns a tensor of the
    checkpoint by name.
    """
    geometry = model.geometry
    attention = model.family.attention
    norm = model.qk_norm
    module = attention.module_of(layer)
    q, k, v = _read_qkv(model, module, "weight", read)
    o = _turned(model, read(f"{module}.{attention.o}.weight"))
    weights = AttentionWeights(
        q, k, v, o.reshape(geometry.model_dim, geometry.heads, geometry.head_dim)
    )
    if "q" in model.biased:
        q_bias, k_bias, v_bias = _read_qkv(model, module, "bias", read)
        weights = replace(weights, q_bias=q_bias, k_bias=k_bias, v_bias=v_bias)
    if "o" in model.biased:
        weights = replace(weights, o_bias=read(f"{module}.{attention.o}.bias"))
    if attention.sinks is not None:
        weights = replace(weights, sinks=read(f"{module}.{attention.sinks}"))
    if norm is not None:
        eps = float(evaluate(norm.eps, model.values))
        q_norm = _read_norm(norm, module, "q", (geometry.heads, geometry.head_dim), eps, read)
        k_norm = _read_norm(norm, module, "k", (geometry.kv_heads, geometry.head_dim), eps, read)
        weights = replace(weights, q_norm=q_norm, k_norm=k_norm)
    return _rotary_order(model, weights, (-1, 2))


def write_layer(
    model: Model, layer: int, weights: AttentionWeights, roles: Collection[Role] = ROLES
) -> dict[str, Tensor]:
    """The stored tensors for ``roles`` of ``layer``, by name; each is contiguous and keeps its
    dtype in ``weights``.

    The numbers of heads come from ``weights``, so ``model`` may be the source. A fused tensor is
    written whole if any of its roles is in ``roles``. Raises ``ValueError`` if ``weights`` has a
    bias or norm that the family cannot store, or lacks one that the family needs.
    """
    _check_stored(model, weights)
    attention = model.family.attention
    norm = model.qk_norm
    module = attention.module_of(layer)
    stored = _rotary_order(model, weights, (2, -1))
    tensors = _join_qkv(model, module, "weight", (stored.q, stored.k, stored.v), roles)
    if stored.q_bias is not None and stored.k_bias is not None and stored.v_bias is not None:
        tensors |= _join_qkv(
            model, module, "bias", (stored.q_bias, stored.k_bias, stored.v_bias), roles
        )
    if "o" in roles:
        tensors[f"{module}.{attention.o}.weight"] = _turned(
            model, stored.o.reshape(stored.model_dim, -1)
        )
        if stored.o_bias is not None:
            tensors[f"{module}.{attention.o}.bias"] = stored.o_bias
    if "q" in roles and stored.sinks is not None:
        tensors[f"{module}.{attention.sinks}"] = stored.sinks
    norms: dict[Role, HeadNorm | None] = {"q": stored.q_norm, "k": stored.k_norm}
    for role, head_norm in norms.items():
        if norm is not None and head_norm is not None and role in roles:
            tensors |= _write_norm(norm, module, role, head_norm)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _read_qkv(model: Model, module: str, kind: str, read: Read) -> tuple[Tensor, Tensor, Tensor]:
    """The query, key and value weights ``[heads, D, E]`` (``kind`` weight) or biases ``[heads, D]``
    (``kind`` bias).
    """
    attention = model.family.attention
    geometry = model.geometry
    heads = geometry.heads
    kv_heads = geometry.kv_heads

    def rows(name: str | None, count: int) -> Tensor:
        """The tensor ``name``, ``[count D, E]`` or ``[count D]``, with its rows split by head."""
        tensor = _turned(model, read(f"{module}.{name}.{kind}"))
        return tensor.reshape(count, geometry.head_dim, *tensor.shape[1:])

    if attention.layout == "separate":
        return rows(attention.q, heads), rows(attention.k, kv_heads), rows(attention.v, kv_heads)
    fused = rows(attention.qkv, heads + 2 * kv_heads)
    if attention.layout == "per_group":
        # Each group lies together (GPT-NeoX, Falcon): its queries, then its key, then its value.
        groups = torch.unflatten(fused, 0, (kv_heads, -1))
        return groups[:, :-2].flatten(0, 1), groups[:, -2], groups[:, -1]
    return fused[:heads], fused[heads : heads + kv_heads], fused[heads + kv_heads :]


def _join_qkv(
    model: Model,
    module: str,
    kind: str,
    parts: tuple[Tensor, Tensor, Tensor],
    roles: Collection[Role],
) -> dict[str, Tensor]:
    """The stored tensors for the query, key and value ``parts``, by name; the inverse of
    `_read_qkv`.
    """
    attention = model.family.attention
    if attention.layout == "separate":
        named = zip(("q", "k", "v"), (attention.q, attention.k, attention.v), parts, strict=True)
        return {
            f"{module}.{name}.{kind}": part.flatten(0, 1)
            for role, name, part in named
            if role in roles
        }
    if not {"q", "k", "v"} & set(roles):
        return {}
    q, k, v = parts
    fused = torch.cat(parts)
    if attention.layout == "per_group":
        groups = torch.unflatten(q, 0, (len(k), -1))
        fused = torch.cat([groups, k[:, None], v[:, None]], 1).flatten(0, 1)
    return {f"{module}.{attention.qkv}.{kind}": _turned(model, fused.flatten(0, 1))}


def _turned(model: Model, tensor: Tensor) -> Tensor:
    # The Conv1D of GPT-2 stores [inputs, outputs].
    return tensor.T if model.family.attention.transposed and tensor.dim() == 2 else tensor


def _read_norm(
    norm: Norm, module: str, role: Role, shape: tuple[int, int], eps: float, read: Read
) -> HeadNorm:
    def rows(kind: str) -> Tensor:
        stored = torch.cat(
            [read(f"{module}.{name}.{kind}").flatten() for name in norm.modules(role, shape[0])]
        )
        return stored.repeat(shape[0], 1) if norm.extent == "shared" else stored.reshape(shape)

    return HeadNorm(
        kind=norm.kind,
        weight=rows("weight"),
        bias=rows("bias") if norm.bias else None,
        eps=eps,
        offset=norm.offset,
        extent="flat" if norm.extent == "flat" else "head",
        shared=norm.extent == "shared",
        after_rotary=norm.after_rotary,
    )


def _write_norm(norm: Norm, module: str, role: Role, head_norm: HeadNorm) -> dict[str, Tensor]:
    tensors = {}
    for kind, rows in (("weight", head_norm.weight), ("bias", head_norm.bias)):
        if rows is None:
            continue
        # A fold that gives heads different gains cannot be stored by this class: it must not be cut
        # down to one.
        if norm.extent == "shared" and not torch.equal(rows, rows[:1].expand_as(rows)):
            raise ValueError(
                f"{module}: the {role} norm is stored once for all heads, but its rows differ"
                " between heads"
            )
        parts = {
            "shared": (rows[0],),
            "flat": (rows.flatten(),),
            "head": (rows,),
            "per_head": tuple(rows),
        }
        for name, part in zip(norm.modules(role, len(rows)), parts[norm.extent], strict=True):
            tensors[f"{module}.{name}.{kind}"] = part
    return tensors


def _check_stored(model: Model, weights: AttentionWeights) -> None:
    """Raise ``ValueError`` unless ``weights`` has exactly the biases, norms and sinks that the
    family stores.
    """
    # A tensor too many would be dropped by whoever loads the result, one too few would be
    # initialized at random there.
    stored = {f"{role}_bias": role in model.biased for role in ROLES}
    stored |= dict.fromkeys(("q_norm", "k_norm"), model.qk_norm is not None)
    stored["sinks"] = model.family.attention.sinks is not None
    for name, needed in stored.items():
        if (getattr(weights, name) is not None) != needed:
            rule = "needs" if needed else "cannot store"
            raise ValueError(
                f"model_type {model.family.model_type!r} with this config {rule} {name}"
            )


def _rotary_order(
    model: Model, weights: AttentionWeights, pairs: tuple[int, int]
) -> AttentionWeights:
    """Switch the rotary dims of q and k to the other order; a no-op if the family stores them
    half-split.

    ``pairs`` is the shape of the current dims: ``(-1, 2)`` if they are interleaved, ``(2, -1)`` if
    they are half-split.
    """
    if model.family.rotary.style == "half":
        return weights
    dims = model.geometry.rotary_dims
    # Dims behind the rotary ones (partial rotation) stay where they are.
    index = torch.cat(
        [torch.arange(dims).view(pairs).T.flatten(), torch.arange(dims, model.geometry.head_dim)]
    )

    def reorder(rows: Tensor) -> Tensor:
        return rows.index_select(1, index.to(rows.device))

    changes: dict[str, Any] = {}
    for name in ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm"):
        rows = getattr(weights, name)
        if rows is not None:
            changes[name] = rows.map(reorder) if isinstance(rows, HeadNorm) else reorder(rows)
    return replace(weights, **changes)
