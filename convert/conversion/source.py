"""The source of a conversion: its stream of layers, and its attention read from its files."""

import torch
from torch import Tensor

from kvfold.convert.checkpoint.tensors import refuse_non_finite, torch_dtype
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.device import choose_device, compute_dtype
from kvfold.convert.errors import InputError
from kvfold.convert.families.layout import layer_rotary, read_layer
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import rope_table
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.transforms.weights import AttentionWeights, Rotary
from kvfold.convert.walk.statistics import ReadHeads, SourceHeads


def source_stream(plan: Plan) -> CheckpointStream:
    """The source as a stream of layers, on the device and in the precision that the request names."""
    checkpoint, device = plan.checkpoint, choose_device(plan.request.device)
    dtype = compute_dtype(checkpoint, device)
    return CheckpointStream(checkpoint.config, checkpoint.read, list(checkpoint.tensors), device, dtype)


def source_layer(plan: Plan, layer: int) -> AttentionWeights:
    """The source's attention in ``layer``. Raises InputError when a weight that its transform reads is not finite."""
    checkpoint, needed = plan.checkpoint, set(plan.reads[layer])

    def read(name: str) -> Tensor:
        info = checkpoint.info(name)
        if name not in needed:
            # Pooling leaves queries and the output alone: they get a shape, and no bytes are read.
            return torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")
        tensor = checkpoint.read(name)
        refuse_non_finite(tensor, f"{checkpoint.origin}: tensor {name!r} in {info.file}")
        return tensor

    return read_layer(plan.model, layer, read)


def source_heads(plan: Plan) -> ReadHeads | None:
    """Reads a layer for statistics that take its weights; None where these say nothing more."""
    model = plan.model
    # They do behind norms on queries and keys, and where attention does not show its queries and keys: other layers are
    # not read once more for nothing.
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
    """The frequencies that a fold is fitted to. They only guide the fit: the model keeps its own rotation."""
    try:
        return source_rotary(plan, layer)
    except InputError:
        # Rope types whose frequencies depend on the length of the text (dynamic) count as those of short texts.
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
