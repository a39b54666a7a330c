"""The layout of an output checkpoint, known before any weight is read: config, tensors, and
encoding of layers.

With ``--keep-quantized``, copied weights remain as in the source (FP8, MXFP4). Stock classes can
load them together with dense attention, because ``modules_to_not_convert`` in the config names the
dense modules. All other weights, and copied weights that the output class stores in another form,
are dequantized.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvfold.convert.checkpoint.dequantized import DequantizingReader
from kvfold.convert.checkpoint.formats import StoredWeight
from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TORCH_NAMES
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.shards import OutputTensor

if TYPE_CHECKING:
    from torch import Tensor

_STORED = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
_OUTPUT_HEAD = (  # always named as dense: whether it is a module depends on tying, which transformers decides
    "lm_head"
)


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


def keepable(
    tensors: Iterable[OutputTensor], checkpoint: Checkpoint, attention: Collection[str]
) -> dict[str, StoredWeight]:
    """The weights among ``tensors`` that can remain quantized as in the source's files, by name."""
    # Attention is dense, converted or not: engines join its projections and need one form.
    kept = {
        name: weight for name, weight in checkpoint.reader.keepable.items() if name not in attention
    }
    return {tensor.name: kept[tensor.source] for tensor in tensors if tensor.source in kept}


def kept_tensors(
    tensors: Iterable[OutputTensor], kept: Mapping[str, StoredWeight]
) -> tuple[OutputTensor, ...]:
    """``tensors`` with each weight in ``kept`` replaced by its parts in the source's files."""
    parts: list[OutputTensor] = []
    for tensor in tensors:
        if (weight := kept.get(tensor.name)) is None:
            parts.append(tensor)
            continue
        stem = tensor.name.removesuffix(weight.format.dense)
        for end, info in weight.parts.items():
            parts.append(OutputTensor(stem + end, info.dtype, info.shape, info.name, kept=info))
    return tuple(parts)


def kept_config(
    config: Mapping[str, Any], tensors: Iterable[OutputTensor], checkpoint: Checkpoint
) -> dict[str, Any]:
    """``config`` with the source's quantization settings, for a checkpoint with the tensors from
    `kept_tensors`.
    """
    assert isinstance(checkpoint.reader, DequantizingReader)
    matrices = [
        tensor for tensor in tensors if len(tensor.shape) == 2 and tensor.name.endswith(".weight")
    ]
    dense = {tensor.name.removesuffix(".weight") for tensor in matrices if tensor.kept is None}
    settings = {
        **checkpoint.reader.settings,
        "modules_to_not_convert": sorted({_OUTPUT_HEAD, *dense}),
    }
    return {**config, "quantization_config": settings}
