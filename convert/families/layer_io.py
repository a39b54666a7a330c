"""Conversion of a layer's attention between stored tensors and canonical weights
(``transforms/weights.py``).

Canonical weights are half-split (interleaved rotary dims are permuted on reading and back on
writing) and keep the stored dtype. Reading and writing only move elements, so
``make_stored_tensors(read_attention_weights(...))`` reproduces the same bits.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.families.model import Model
from kvfold.convert.families.schema import ROLES, AttentionSchema, QueryKeyNorm, Role
from kvfold.convert.transforms.weights import AttentionWeights, HeadNorm, Rotary

Read = Callable[[str], Tensor]
_SUFFIXES = {"weight": "", "bias": "_bias"}  # of the fields of AttentionWeights


def make_layer_rotary(model: Model, layer: int) -> Rotary:
    """The rotary embedding of ``layer`` for short texts; it has no frequencies if the layer does
    not rotate.
    """
    theta, amplitude = model.compute_frequencies(layer)
    return Rotary(torch.tensor(theta, dtype=torch.float64), amplitude)


def read_attention_weights(model: Model, layer: int, read: Read) -> AttentionWeights:
    """The attention weights of ``layer`` in canonical form and in their stored dtype. ``read``
    returns a tensor of the checkpoint by name.
    """
    size = model.geometry
    attention = model.family.attention
    module = attention.format_module_name(layer)

    def load_attention_tensor(name: str) -> Tensor:
        """The attention module's tensor ``name``, ``[outputs, inputs]`` if it is a weight."""
        return _transpose_if_conv1d(attention, read(f"{module}.{name}"))

    output = load_attention_tensor(f"{attention.o}.weight")
    tensors: dict[str, Any] = {"o": output.reshape(size.model_dim, size.heads, size.head_dim)}
    for kind, suffix in _SUFFIXES.items():
        if kind == "bias" and "q" not in model.biased:
            continue
        stored = [load_attention_tensor(f"{name}.{kind}") for name in attention.qkv]
        rows = [torch.unflatten(tensor, 0, (-1, size.head_dim)) for tensor in stored]
        if len(rows) == 1 and attention.layout == "per_group":
            # Each group lies together (GPT-NeoX, Falcon): its queries, its key, its value.
            groups = torch.unflatten(rows[0], 0, (size.kv_heads, -1))
            rows = [groups[:, :-2].flatten(0, 1), groups[:, -2], groups[:, -1]]
        elif len(rows) == 1:
            rows = list(torch.split(rows[0], [size.heads, size.kv_heads, size.kv_heads]))
        for role, heads in zip("qkv", rows, strict=True):
            tensors[f"{role}{suffix}"] = heads
    if "o" in model.biased:
        tensors["o_bias"] = load_attention_tensor(f"{attention.o}.bias")
    if attention.sinks is not None:
        tensors["sinks"] = load_attention_tensor(attention.sinks)
    if model.qk_norm is not None:
        for role, count in (("q", size.heads), ("k", size.kv_heads)):
            tensors[f"{role}_norm"] = _read_head_norm(
                model.qk_norm, role, (count, size.head_dim), load_attention_tensor
            )
    return _reorder_rotary_dims(model, AttentionWeights(**tensors), (-1, 2))


def make_stored_tensors(
    model: Model, layer: int, weights: AttentionWeights, roles: Collection[Role] = ROLES
) -> dict[str, Tensor]:
    """The tensors, by name, in which the model's class stores ``weights`` of ``layer``; only those
    that contain one of ``roles``. Each is contiguous and keeps its dtype.

    The numbers of heads come from ``weights``, so ``model`` may be the source. A fused tensor is
    written whole if any of its roles is in ``roles``. Raises ``ValueError`` if the family cannot
    store a norm of ``weights``.
    """
    attention = model.family.attention
    stored = _reorder_rotary_dims(model, weights, (2, -1))
    tensors: dict[str, Tensor | None] = {}
    for kind, suffix in _SUFFIXES.items():
        rows = [getattr(stored, f"{role}{suffix}") for role in "qkv"]
        if rows[0] is None:
            continue
        if len(attention.qkv) == 1 and attention.layout == "per_group":
            q, k, v = rows
            groups = torch.unflatten(q, 0, (len(k), -1))
            rows = [torch.cat([groups, k[:, None], v[:, None]], 1).flatten(0, 1)]
        elif len(attention.qkv) == 1:
            rows = [torch.cat(rows)]
        for name, heads in zip(attention.qkv, rows, strict=True):
            tensors[f"{name}.{kind}"] = heads.flatten(0, 1)
    tensors[f"{attention.o}.weight"] = stored.o.flatten(1)
    tensors[f"{attention.o}.bias"] = stored.o_bias
    if attention.sinks is not None:
        tensors[attention.sinks] = stored.sinks
    for role in roles:
        norm = getattr(stored, f"{role}_norm", None)
        # The values of a norm that is not written may not have been read.
        if model.qk_norm is not None and norm is not None:
            tensors |= _make_norm_tensors(model.qk_norm, role, norm)
    result = {}
    for suffix, tensor in tensors.items():
        name = f"{attention.format_module_name(layer)}.{suffix}"
        if tensor is not None and not set(roles).isdisjoint(model.tensors[name].roles):
            result[name] = _transpose_if_conv1d(attention, tensor).contiguous()
    # Nothing may be left out without a word.
    assert result.keys() == set(model.list_attention_tensors(layer, roles))
    return result


def _transpose_if_conv1d(attention: AttentionSchema, tensor: Tensor) -> Tensor:
    """``tensor`` transposed if it is a matrix of a class that stores ``[inputs, outputs]``,
    otherwise unchanged.
    """
    # The Conv1D of GPT-2 stores [inputs, outputs].
    return tensor.T if attention.transposed and tensor.dim() == 2 else tensor


def _read_head_norm(norm: QueryKeyNorm, role: str, shape: tuple[int, int], load: Read) -> HeadNorm:
    """The norm on the queries (``role`` q) or keys (k), with its weight repeated for every head.
    ``shape`` is (heads, head dim).
    """
    heads, dim = shape
    rows = {}
    for kind in norm.kinds:
        stored = [load(f"{name}.{kind}").flatten() for name in norm.list_module_names(role, heads)]
        different = torch.cat(stored).view(-1, dim)
        rows[kind] = different.repeat(heads // len(different), 1)
    return HeadNorm(
        kind=norm.kind,
        **rows,
        eps=norm.eps,
        offset=norm.offset,
        extent="flat" if norm.extent == "flat" else "head",
        shared=norm.extent == "shared",
        after_rotary=norm.after_rotary,
    )


def _make_norm_tensors(norm: QueryKeyNorm, role: str, head_norm: HeadNorm) -> dict[str, Tensor]:
    """The tensors, by their names in the attention module, in which the class stores a query norm
    (``role`` q) or key norm (k).
    """
    tensors = {}
    for kind in norm.kinds:
        rows = getattr(head_norm, kind)
        # A fold that gives heads different gains cannot be stored by this class: it must not be cut
        # down to one.
        if norm.extent == "shared" and not torch.equal(rows, rows[:1].expand_as(rows)):
            raise ValueError(f"the {role} norm is stored once for all heads, but its rows differ")
        stored = {"shared": rows[:1], "flat": rows.view(1, -1), "head": rows[None]}
        names = norm.list_module_names(role, len(rows))
        for name, tensor in zip(names, stored.get(norm.extent, rows), strict=True):
            tensors[f"{name}.{kind}"] = tensor
    return tensors


def _reorder_rotary_dims(
    model: Model, weights: AttentionWeights, pairs: tuple[int, int]
) -> AttentionWeights:
    """The weights with the rotary dims of queries and keys in the other order (interleaved or
    half-split); unchanged if the family stores them half-split.

    ``pairs`` is the shape of the current dims: ``(-1, 2)`` if they are interleaved, ``(2, -1)`` if
    they are half-split.
    """
    if model.family.rotary.style == "half":
        return weights
    dims = model.geometry.rotary_dims
    # Dims behind the rotary ones (partial rotation) stay where they are.
    index = torch.arange(model.geometry.head_dim)
    index[:dims] = index[:dims].view(pairs).T.flatten()

    def reorder_rows(rows: Tensor) -> Tensor:
        # Tensors that are not written may be on the meta device.
        return rows[:, index.to(rows.device)]

    changes: dict[str, Any] = {}
    for name in ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm"):
        value = getattr(weights, name)
        if isinstance(value, HeadNorm):
            changes[name] = value.map_tensors(reorder_rows)
        elif value is not None:
            changes[name] = reorder_rows(value)
    return replace(weights, **changes)
