"""The source's attention layers, read from its files."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.tensors import refuse_non_finite, torch_dtype
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.errors import InputError
from kvfold.convert.families.layout import layer_rotary, read_layer
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import rope_table
from kvfold.convert.transforms.weights import AttentionWeights, Rotary
from kvfold.convert.walk.statistics import ReadHeads, SourceHeads


def source_layer(plan: Plan, layer: int) -> AttentionWeights:
    """The source's attention in ``layer``. Raises InputError when a weight is not finite."""
    return read_layer(plan.model, layer, reader(plan, layer))


def source_heads(plan: Plan) -> ReadHeads | None:
    """What reads a layer for statistics that take its weights; None where these say nothing more.

    They do behind norms on queries and keys, and where attention does not show its queries and keys: other layers are
    not read once more for nothing.
    """
    model = plan.model
    if model.qk_norm is None and model.family.attention.shown:
        return None

    def read(layer: int) -> SourceHeads:
        how = model.layers[layer]
        return SourceHeads(source_layer(plan, layer), source_rotary(plan, layer), how.scale, how.clip)

    return read


def source_rotary(plan: Plan, layer: int) -> Rotary:
    """Frequencies of ``layer``; those of the short range where longrope has two sets (the context is cut to it)."""
    return layer_rotary(plan.model, layer, "short")


def fold_rotary(plan: Plan, layer: int) -> Rotary:
    """The frequencies that a fold is fitted to. They only guide the fit: the model keeps its own rotation.

    Rope types whose frequencies depend on the length of the text (dynamic) count as those of short texts.
    """
    try:
        return source_rotary(plan, layer)
    except InputError:
        model = plan.model
        kind = model.layers[layer].type
        table = {**rope_table(model.values, kind), "rope_type": "default"}
        tables = {kind: table} if kind in (model.family.rotary.by_type or {}) else table
        plain = Model(model.family, {**model.config, "rope_scaling": None, "rope_parameters": tables})
        return layer_rotary(plain, layer)


def fold_context(plan: Plan, layer: int) -> int:
    """The number of positions back that ``layer`` has to see."""
    window = plan.model.layers[layer].window
    return min(plan.geometry.positions, window or plan.geometry.positions)


def reader(plan: Plan, layer: int) -> Callable[[str], Tensor]:
    """Reads what the transform of ``layer`` needs, refusing non-finite weights; the rest has a shape but no bytes."""
    needed = set(plan.read_names(layer))

    def read(name: str) -> Tensor:
        info = plan.checkpoint.info(name)
        if name not in needed:
            return torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")
        return finite(plan.checkpoint, name)

    return read


def finite(checkpoint: Checkpoint, name: str) -> Tensor:
    """The tensor ``name``. Raises InputError when it holds NaN or infinity."""
    tensor = checkpoint.read(name)
    refuse_non_finite(tensor, f"{checkpoint.origin}: tensor {name!r} in {checkpoint.info(name).file}")
    return tensor
