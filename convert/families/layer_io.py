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
    module = attention.module_of(layer)
    tensors: dict[str, Any] = {}
    tensors["q"], tensors["k"], tensors["v"] = _read_qkv(model, module, "weight", read)
    o = _turned(model, read(f"{module}.{attention.o}.weight"))
    tensors["o"] = o.reshape(geometry.model_dim, geometry.heads, geometry.head_dim)
    if "q" in model.biased:
        biases = _read_qkv(model, module, "bias", read)
        tensors |= zip(("q_bias", "k_bias", "v_bias"), biases, strict=True)
    if "o" in model.biased:
        tensors["o_bias"] = read(f"{module}.{attention.o}.bias")
    if attention.sinks is not None:
        tensors["sinks"] = read(f"{module}.{attention.sinks}")
    if model.qk_norm is not None:
        tensors["q_norm"] = _read_norm(model, model.qk_norm, module, "q", geometry.heads, read)
        tensors["k_norm"] = _read_norm(model, model.qk_norm, module, "k", geometry.kv_heads, read)
    return _rotary_order(model, AttentionWeights(**tensors), (-1, 2))


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
    module = attention.module_of(layer)
    stored = _rotary_order(model, weights, (2, -1))
    tensors = _join_qkv(model, module, "weight", stored.q, stored.k, stored.v)
    if stored.q_bias is not None and stored.k_bias is not None and stored.v_bias is not None:
        tensors |= _join_qkv(model, module, "bias", stored.q_bias, stored.k_bias, stored.v_bias)
    output = stored.o.reshape(stored.model_dim, -1)
    tensors[f"{module}.{attention.o}.weight"] = _turned(model, output)
    if stored.o_bias is not None:
        tensors[f"{module}.{attention.o}.bias"] = stored.o_bias
    if stored.sinks is not None:
        tensors[f"{module}.{attention.sinks}"] = stored.sinks
    norms: dict[Role, HeadNorm | None] = {"q": stored.q_norm, "k": stored.k_norm}
    for role, norm in norms.items():
        # The values of a norm that is not written may not have been read.
        if model.qk_norm is not None and norm is not None and role in roles:
            tensors |= _write_norm(model.qk_norm, module, role, norm)
    return {
        name: tensor.contiguous()
        for name, tensor in tensors.items()
        if not set(roles).isdisjoint(model.tensors[name].roles)
    }


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
    model: Model, module: str, kind: str, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Tensor]:
    """The stored tensors for queries, keys and values, by name; the inverse of `_read_qkv`."""
    attention = model.family.attention
    if attention.layout == "separate":
        rows = {attention.q: q, attention.k: k, attention.v: v}
        return {f"{module}.{name}.{kind}": part.flatten(0, 1) for name, part in rows.items()}
    fused = torch.cat([q, k, v])
    if attention.layout == "per_group":
        groups = torch.unflatten(q, 0, (len(k), -1))
        fused = torch.cat([groups, k[:, None], v[:, None]], 1).flatten(0, 1)
    return {f"{module}.{attention.qkv}.{kind}": _turned(model, fused.flatten(0, 1))}


def _turned(model: Model, tensor: Tensor) -> Tensor:
    # The Conv1D of GPT-2 stores [inputs, outputs].
    return tensor.T if model.family.attention.transposed and tensor.dim() == 2 else tensor


def _read_norm(
    model: Model, norm: Norm, module: str, role: Role, heads: int, read: Read
) -> HeadNorm:
    def rows(kind: str) -> Tensor:
        names = norm.modules(role, heads)
        stored = torch.cat([read(f"{module}.{name}.{kind}").flatten() for name in names])
        copies = heads if norm.extent == "shared" else 1
        return stored.repeat(copies).reshape(heads, model.geometry.head_dim)

    return HeadNorm(
        kind=norm.kind,
        weight=rows("weight"),
        bias=rows("bias") if norm.bias else None,
        eps=float(evaluate(norm.eps, model.values)),
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
