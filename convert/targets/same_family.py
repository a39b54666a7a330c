"""GQA and MQA: the source's own family and class, with fewer key/value heads."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from kvfold.convert.families.model import Family, Geometry
from kvfold.convert.families.names import ROLES, Role, attention_names
from kvfold.convert.io.checkpoint import Checkpoint
from kvfold.convert.io.config import dtype_changes, edit_config
from kvfold.convert.io.headers import FLOAT_DTYPES
from kvfold.convert.io.shards import OutputTensor
from kvfold.convert.targets.target import TargetLayout

if TYPE_CHECKING:
    from torch import Tensor

POOLED: tuple[Role, ...] = ("k", "v")
ABSORBED: tuple[Role, ...] = ROLES

_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def folded_layout(
    family: Family, checkpoint: Checkpoint, kv_heads: int, *, roles: Collection[Role], dtype: str | None
) -> TargetLayout:
    """The checkpoint with ``kv_heads`` key/value heads, of which the transform makes ``roles``.

    ``dtype`` is the stored dtype in torch's spelling, or None to keep each tensor's own.
    """
    # Imported here: layout.py needs torch, and a plan is also made where torch is not wanted.
    from kvfold.convert.families.layout import kv_config, write_layer

    source = checkpoint.config
    config = edit_config(source, kv_config(family, source, kv_heads))
    if dtype is not None:
        config = edit_config(config, dtype_changes(config, dtype))
    geometry = family.geometry(config)
    computed = tuple(role_tensors(family, config, layer, roles) for layer in range(geometry.layers))
    tensors = _output_tensors(family, checkpoint, config, {name for names in computed for name in names}, dtype)

    def encode(layer: int, weights: Any) -> Mapping[str, "Tensor"]:
        return write_layer(family, config, layer, weights, roles)

    return TargetLayout(attention_label(geometry), config, tensors, computed, numbers_cached(geometry), encode)


def _output_tensors(
    family: Family, checkpoint: Checkpoint, config: Mapping[str, Any], computed: Collection[str], dtype: str | None
) -> tuple[OutputTensor, ...]:
    """The source's tensors in their order, without those that went with their head (one norm tensor per head)."""
    shapes, known = family.expected_tensors(config), family.expected_tensors(checkpoint.config)
    return tuple(
        OutputTensor(
            info.name,
            stored_dtype(info.dtype, dtype),
            shapes.get(info.name, info.shape),
            None if info.name in computed else info.name,
        )
        for info in checkpoint.tensors.values()
        if info.name in shapes or info.name not in known
    )


def role_tensors(family: Family, config: Mapping[str, Any], layer: int, roles: Collection[Role]) -> tuple[str, ...]:
    """The file tensors that hold ``roles`` of ``layer``, each once."""
    names = attention_names(family, config, layer)
    return tuple(dict.fromkeys(name for role in ROLES if role in roles for name in names[role]))


def stored_dtype(present: str, dtype: str | None) -> str:
    """The safetensors dtype of an output tensor: ``dtype`` (torch's spelling) for floats, else what it is now."""
    return present if dtype is None or present not in FLOAT_DTYPES else _STORED[dtype]


def numbers_cached(geometry: Geometry) -> int:
    """Numbers that one token takes in the cache of one layer: a key and a value per key/value head."""
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
