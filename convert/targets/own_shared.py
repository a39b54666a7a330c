"""Encoder-decoders in layout ``kvfold``: the decoder's key and value projections, narrower under their own names.

The checkpoint brings ``attention/checkpoints/modeling_kvfold_seq2seq.py`` along, which keeps the stock attention and
has its heads share what the narrower projections give. So every tensor keeps its name, and all but these their bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.shards import OutputTensor
from kvfold.convert.families.model import Model
from kvfold.convert.families.tensors import Role
from kvfold.convert.targets.own_code import Shape, own_config, own_module
from kvfold.convert.targets.same_family import POOLED, attention_label, cache_elements, stored_dtype
from kvfold.convert.targets.target import TargetLayout

if TYPE_CHECKING:
    from torch import Tensor


def shared_layout(
    source: Model, checkpoint: Checkpoint, kv_heads: int, roles: Sequence[Role], dtype: str | None
) -> TargetLayout:
    """The checkpoint with ``kv_heads`` key/value heads in every attention of its decoder.

    ``roles`` are the projections that change. ``dtype`` is the stored dtype in torch's spelling, or None to keep each
    tensor's own.
    """
    attention, size = source.family.attention, replace(source.geometry, kv_heads=kv_heads)
    facts = {"variant": "shared", "kv_heads": kv_heads, "key": attention.k, "value": attention.v}
    shapes = shared_shapes(source, kv_heads)

    def encode(layer: int, weights: Any) -> Mapping[str, "Tensor"]:
        from kvfold.convert.families.layout import write_layer  # needs torch, a plan does not

        return write_layer(source, layer, weights, roles)

    computed = tuple(source.attention_names(layer, roles) for layer in range(size.layers))
    changed = {name for names in computed for name in names}
    return TargetLayout(
        kind=attention_label(size),
        config=own_config(source, checkpoint, facts, dtype),
        tensors=tuple(
            OutputTensor(
                info.name,
                stored_dtype(info.dtype, dtype),
                shapes.get(info.name, info.shape),
                None if info.name in changed else info.name,
            )
            for info in checkpoint.tensors.values()
        ),
        computed=computed,
        cache_elements=cache_elements(size),
        encode=encode,
        code=own_module(source),
    )


def shared_shapes(source: Model, kv_heads: int) -> dict[str, Shape]:
    """The tensors of the narrower projections, by name."""
    rows = kv_heads * source.geometry.head_dim
    names = (name for layer in range(source.geometry.layers) for name in source.attention_names(layer, POOLED))
    return {name: (rows, *source.tensors[name].shape[1:]) for name in names}
