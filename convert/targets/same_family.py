"""Plan a conversion to GQA or MQA in the source's own model class."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kvfold.convert.checkpoint.files import remove_code_reference, set_config_dtype
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.writer import PlannedTensor
from kvfold.convert.families.model import Model, ModelSizes
from kvfold.convert.families.rotary import make_older_rope_keys
from kvfold.convert.families.schema import Role
from kvfold.convert.targets.output_checkpoint import OutputCheckpoint, choose_output_dtype


@dataclass(frozen=True, kw_only=True)
class FoldCheckpoint(OutputCheckpoint):
    """The planned checkpoint of a model converted to GQA or MQA. ``model`` describes the source
    with fewer key/value heads; ``roles`` are the projections that are computed.
    """

    model: Model
    roles: Collection[Role]

    def encode_layer(self, layer: int, weights: Any) -> Mapping[str, Any]:
        """Return the stored projections of ``layer`` by name, from its converted attention
        ``weights``.
        """
        from kvfold.convert.families.layer_io import make_stored_tensors  # needs torch

        return make_stored_tensors(self.model, layer, weights, self.roles)


def plan_gqa_checkpoint(
    source: Model,
    checkpoint: Checkpoint,
    kv_heads: int,
    roles: Collection[Role],
    dtype: str,
) -> OutputCheckpoint:
    """Plan the checkpoint of ``source`` converted to ``kv_heads`` key/value heads in its own class.
    ``roles`` are the projections that are computed, all others are copied.
    """
    key = source.family.sizes.kv_heads
    assert key is not None  # layout kvfold is for the families whose class does not share heads
    changes: dict[str, Any] = {source.values.find_config_key(key)[0]: kv_heads}
    target = Model(source.family, {**source.config, **changes}, source.tower)
    # Only the keys that change are edited: other readers need the older spellings that a round trip
    # would drop.
    text = checkpoint.config.get("text_config")
    if source.tower is None:
        # mlx-lm and others read the rotary embedding only in the spelling of before transformers 5.
        changes |= make_older_rope_keys(checkpoint.config)
    elif text:  # some wrappers were flat before transformers 5
        changes = {"text_config": {**text, **changes}}
    config = remove_code_reference({**checkpoint.config, **changes})
    if dtype != "auto":
        config = set_config_dtype(config, dtype)
    tensors = []
    for name, info in checkpoint.tensors.items():
        tensor = target.tensors.get(name)
        if tensor is None and name in source.tensors:
            continue  # the norm of a key head that is gone, where each head has a tensor
        shape = info.shape if tensor is None else tensor.shape
        copied = tensor is None or set(roles).isdisjoint(tensor.roles)
        dtype_name = choose_output_dtype(info.dtype, dtype)
        tensors.append(PlannedTensor(name, dtype_name, shape, name if copied else None))
    # The norms of key heads that are added, where each head has a tensor.
    added = [tensor for name, tensor in target.tensors.items() if name not in source.tensors]
    for tensor in added:
        like = next(old for old in source.tensors.values() if old.roles == tensor.roles)
        dtype_name = choose_output_dtype(checkpoint.tensors[like.name].dtype, dtype)
        tensors.append(PlannedTensor(tensor.name, dtype_name, tensor.shape, None))
    return FoldCheckpoint(
        kind=format_attention_label(target.geometry.heads, kv_heads),
        config=config,
        tensors=tuple(tensors),
        model=target,
        roles=roles,
    )


def count_cache_elements(geometry: ModelSizes) -> int:
    """Return the KV-cache elements per token per layer: the dims of one key and one value for every
    key/value head.
    """
    return 2 * geometry.kv_heads * geometry.head_dim


def format_attention_label(heads: int, kv_heads: int) -> str:
    """Return the kind of attention: ``MHA``, ``MQA``, or ``GQA-8`` for 8 key/value heads."""
    if kv_heads == heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else f"GQA-{kv_heads}"
