"""The layout of an output checkpoint, known before any weight is read: config, tensors, and the
encoding of layers; and GQA and MQA in the source's own family and class.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TORCH_NAMES
from kvfold.convert.checkpoint.members import with_dtype
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.writer import OutputTensor
from kvfold.convert.families.model import Geometry, Model
from kvfold.convert.families.rotary import older_rope_keys
from kvfold.convert.families.schema import Role

if TYPE_CHECKING:
    from torch import Tensor

_STORED = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class OutputLayout:
    """The layout of the checkpoint that a conversion writes.

    kind: its attention, such as ``GQA-8`` or ``MLA 512+64``
    config: the content of config.json
    tensors: all tensors in file order
    computed: for each layer, the names of the tensors that the transform computes; all others are
        copied from the source
    cache_elements: KV-cache elements per token per layer
    code: the module whose file is included in the checkpoint, or None if transformers' own classes
        can load it
    """

    kind: str
    config: dict[str, Any]
    tensors: tuple[OutputTensor, ...]
    computed: tuple[tuple[str, ...], ...]
    cache_elements: int
    code: str | None = None

    def encode(self, layer: int, weights: Any) -> Mapping[str, "Tensor"]:
        """The tensors ``computed[layer]`` by name, from the converted ``weights`` of the layer.

        They may have any float dtype: the writer casts them to the planned one.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FoldLayout(OutputLayout):
    """GQA or MQA, stored as ``model`` (the source with fewer key/value heads) stores its layers;
    ``roles`` are the projections that change.
    """

    model: Model
    roles: Collection[Role]

    def encode(self, layer: int, weights: Any) -> Mapping[str, "Tensor"]:
        from kvfold.convert.families.layer_io import write_layer  # needs torch, a plan does not

        return write_layer(self.model, layer, weights, self.roles)


def folded_layout(
    source: Model,
    checkpoint: Checkpoint,
    kv_heads: int,
    *,
    roles: Collection[Role],
    dtype: str | None,
) -> OutputLayout:
    """The layout of ``source`` with ``kv_heads`` key/value heads in its own class; ``roles`` are
    the projections that change.
    """
    key = source.family.sizes.kv_heads
    assert key is not None  # layout kvfold is for the families whose class does not share heads
    changes: dict[str, Any] = {source.values.find_key(key)[0]: kv_heads}
    target = Model(source.family, {**source.config, **changes}, source.tower)
    # Only the keys that change are edited: other readers need the older spellings that a round trip
    # would drop.
    text = checkpoint.config.get("text_config")
    if source.tower is None:
        # mlx-lm and others read the rotary embedding only in the spelling of before transformers 5.
        changes |= older_rope_keys(checkpoint.config)
    elif text:  # some wrappers were flat before transformers 5
        changes = {"text_config": {**text, **changes}}
    config = {**checkpoint.config, **changes}
    if dtype is not None:
        config = with_dtype(config, dtype)
    layers = tuple(target.attention_names(layer, roles) for layer in range(target.geometry.layers))
    computed = {name for names in layers for name in names}
    tensors = []
    for name, info in checkpoint.tensors.items():
        if name in source.tensors and name not in target.tensors:
            continue  # the norm of a key head that is gone, where each head has a tensor
        shape = target.tensors[name].shape if name in target.tensors else info.shape
        origin = None if name in computed else name
        tensors.append(OutputTensor(name, output_dtype(info.dtype, dtype), shape, origin))
    return FoldLayout(
        kind=attention_label(target.geometry.heads, kv_heads),
        config=config,
        tensors=tuple(tensors),
        computed=layers,
        cache_elements=cache_elements(target.geometry),
        model=target,
        roles=roles,
    )


def output_dtype(present: str, dtype: str | None) -> str:
    """The safetensors dtype of an output tensor: ``present``, or ``dtype`` (torch's spelling) for
    floats if given.
    """
    return present if dtype is None or present not in FLOAT_DTYPES else _STORED[dtype]


def cache_elements(geometry: Geometry) -> int:
    """KV-cache elements per token per layer: the dims of one key and one value for every key/value
    head.
    """
    return 2 * geometry.kv_heads * geometry.head_dim


def attention_label(heads: int, kv_heads: int) -> str:
    """The name of the attention: ``MHA``, ``MQA``, or ``GQA-8`` for 8 key/value heads."""
    if kv_heads == heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else f"GQA-{kv_heads}"
