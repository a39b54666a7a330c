"""What a target must say before any weight is read: the output's config, its tensors, and how a layer is stored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvfold.convert.io.shards import OutputTensor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TargetLayout:
    """The checkpoint that a conversion writes.

    ``tensors`` are all of them, in the order of the files. ``computed[layer]`` names those that the transform makes;
    every other one is copied from the source. ``encode(layer, weights)`` turns a transformed layer into the computed
    tensors, in the terms of the files (any float dtype; the writer casts to the planned one).
    """

    kind: str
    config: dict[str, Any]
    tensors: tuple[OutputTensor, ...]
    computed: tuple[tuple[str, ...], ...]
    cache_elements: int
    encode: Callable[[int, Any], Mapping[str, "Tensor"]]
