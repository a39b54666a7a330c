"""Read the attention of a conversion's source, layer by layer. Does not import transformers, which
takes seconds.
"""

import torch
from torch import Tensor

from kvfold.convert.checkpoint.tensors import refuse_non_finite, torch_dtype
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.errors import InputError
from kvfold.convert.families.layer_io import layer_rotary, read_layer
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import rope_table
from kvfold.convert.transforms.weights import AttentionWeights, Rotary


def source_layer(plan: Plan, layer: int) -> AttentionWeights:
    """Read the source's attention in ``layer``. Raises InputError if a weight needed by its
    transform is not finite.
    """
    checkpoint = plan.checkpoint
    needed = set(plan.reads[layer])

    def read(name: str) -> Tensor:
        info = checkpoint.info(name)
        if name not in needed:
            # Pooling leaves queries and the output alone: they have a shape, but no bytes are read.
            return torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")
        tensor = checkpoint.read(name)
        refuse_non_finite(tensor, f"{checkpoint.origin}: tensor {name!r} in {info.file}")
        return tensor

    return read_layer(plan.model, layer, read)


def source_rotary(plan: Plan, layer: int) -> Rotary:
    """The rotary frequencies for ``layer``; with longrope the short-range set, because the context
    is limited to it.
    """
    return layer_rotary(plan.model, layer, "short")


def fold_rotary(plan: Plan, layer: int) -> Rotary:
    """The rotary frequencies for fitting a fold. They only guide the fit: the output keeps the
    source's rotation.
    """
    try:
        return source_rotary(plan, layer)
    except InputError:
        # Rope types whose frequencies depend on the text length (dynamic) are fitted as for short
        # texts.
        model = plan.model
        kind = model.layers[layer].type
        table = {**rope_table(model.values, kind), "rope_type": "default"}
        tables = {kind: table} if kind in (model.family.rotary.by_type or {}) else table
        plain = Model(
            model.family, {**model.config, "rope_scaling": None, "rope_parameters": tables}
        )
        return layer_rotary(plain, layer)
