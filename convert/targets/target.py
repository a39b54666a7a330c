"""The layout of an output checkpoint, known before any weight is read: config, tensors, and
encoding of layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TORCH_NAMES
from kvfold.convert.checkpoint.shards import OutputTensor

if TYPE_CHECKING:
    from torch import Tensor

_STORED = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


@dataclass(frozen=True)
class OutputLayout:
    """The layout of the checkpoint that a conversion writes.

    ``kind`` is its attention, such as ``GQA-8`` or ``MLA 512+64``. ``tensors`` are all tensors in
    file order; ``computed[layer]`` names those that the transform computes, and all others are
    copied from the source. ``cache_elements`` counts KV-cache elements per token per layer.
    ``encode(layer, weights)`` converts a transformed layer to the computed tensors by name (in any
    float dtype; the writer casts them to the planned dtype). ``code`` is the module whose file is
    included in the checkpoint, or None if transformers' own classes can load it.
    """

    kind: str
    config: dict[str, Any]
    tensors: tuple[OutputTensor, ...]
    computed: tuple[tuple[str, ...], ...]
    cache_elements: int
    encode: Callable[[int, Any], Mapping[str, "Tensor"]]
    code: str | None = None


def output_dtype(present: str, dtype: str | None) -> str:
    """The safetensors dtype of an output tensor: ``present``, or ``dtype`` (torch's spelling) for
    floats if given.
    """
    return present if dtype is None or present not in FLOAT_DTYPES else _STORED[dtype]
