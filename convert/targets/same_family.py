"""GQA and MQA: the source's own family and class, with fewer key/value heads."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TORCH_NAMES
from kvfold.convert.checkpoint.json_text import with_dtype
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.shards import OutputTensor
from kvfold.convert.families.geometry import Geometry
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import older_rope_keys
from kvfold.convert.families.schema import ROLES, Role
from kvfold.convert.targets.target import TargetLayout

if TYPE_CHECKING:
    from torch import Tensor

POOLED: tuple[Role, ...] = ("k", "v")
ABSORBED: tuple[Role, ...] = ROLES

_STORED = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


def folded_layout(
    source: Model, checkpoint: Checkpoint, kv_heads: int, *, roles: Collection[Role], dtype: str | None
) -> TargetLayout:
    """The checkpoint with ``kv_heads`` key/value heads; ``roles`` are the projections that the transform changes.

    ``dtype`` is the stored dtype in torch's spelling, or None to keep each tensor's own.
    """
    changes: dict[str, Any] = source.kv_config(kv_heads)
    target = Model(source.family, {**source.config, **changes}, source.tower)
    # Only the keys that change are edited: other readers need the older spellings that a round trip would drop.
    # mlx-lm and others read the rotary embedding only in the spelling of before transformers 5.
    if source.tower is None:
        changes = changes | older_rope_keys(checkpoint.config)
    elif text := checkpoint.config.get("text_config"):  # some wrappers were flat before transformers 5
        changes = {"text_config": {**text, **changes}}
    config = {**checkpoint.config, **changes}
    if dtype is not None:
        config = with_dtype(config, dtype)
    computed = tuple(target.attention_names(layer, roles) for layer in range(target.geometry.layers))
    tensors = _output_tensors(source, target, checkpoint, {name for names in computed for name in names}, dtype)

    def encode(layer: int, weights: Any) -> Mapping[str, "Tensor"]:
        from kvfold.convert.families.layout import write_layer  # needs torch, a plan does not

        return write_layer(target, layer, weights, roles)

    kind, cached = attention_label(target.geometry), cache_elements(target.geometry)
    return TargetLayout(kind, config, tensors, computed, cached, encode)


def _output_tensors(
    source: Model, target: Model, checkpoint: Checkpoint, computed: Collection[str], dtype: str | None
) -> tuple[OutputTensor, ...]:
    """The source's tensors in their order, without the norms of key heads that are gone (one tensor per head)."""
    return tuple(
        OutputTensor(
            info.name,
            stored_dtype(info.dtype, dtype),
            target.tensors[info.name].shape if info.name in target.tensors else info.shape,
            None if info.name in computed else info.name,
        )
        for info in checkpoint.tensors.values()
        if info.name in target.tensors or info.name not in source.tensors
    )


def stored_dtype(present: str, dtype: str | None) -> str:
    """The safetensors dtype of an output tensor: ``dtype`` (torch's spelling) for floats, else the present one."""
    return present if dtype is None or present not in FLOAT_DTYPES else _STORED[dtype]


def cache_elements(geometry: Geometry) -> int:
    """KV-cache elements per token per layer: a key and a value for every key/value head."""
    return 2 * geometry.kv_heads * geometry.head_dim


def attention_kind(heads: int, kv_heads: int) -> str:
    """``MHA``, ``GQA`` or ``MQA``."""
    if kv_heads == heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"


def attention_label(geometry: Geometry) -> str:
    """The kind with its number of key/value heads, as ``GQA-8``."""
    kind = attention_kind(geometry.heads, geometry.kv_heads)
    return f"GQA-{geometry.kv_heads}" if kind == "GQA" else kind
