"""The layout of an output checkpoint, known before any weight is read: config, tensors, how a layer is stored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.shards import OutputTensor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TargetLayout:
    """The checkpoint that a conversion writes.

    ``kind`` is its attention, such as ``GQA-8`` or ``MLA 512+64``. ``tensors`` are all tensors in the order of the
    files; ``computed[layer]`` names those that the transform makes, every other one is copied from the source.
    ``cache_elements`` counts per token per layer. ``encode(layer, weights)`` turns a transformed layer into the
    computed tensors by their names in the files (any float dtype; the writer casts to the planned one). ``code`` is the
    module whose file the checkpoint brings along, None where transformers' own classes load it.
    """

    kind: str
    config: dict[str, Any]
    tensors: tuple[OutputTensor, ...]
    computed: tuple[tuple[str, ...], ...]
    cache_elements: int
    encode: Callable[[int, Any], Mapping[str, "Tensor"]]
    code: str | None = None
