"""Copied weights that stay quantized as in the source (FP8, MXFP4), for ``--keep-quantized``; no torch.

Stock classes read them together with dense attention: ``modules_to_not_convert`` of the config names the dense modules.
All other weights, and those that the output class stores in another form, are dequantized.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kvfold.convert.checkpoint.dequantized import DequantizingReader
from kvfold.convert.checkpoint.formats import StoredWeight
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.shards import OutputTensor

_LEFT = "modules_to_not_convert"
_HEAD = "lm_head"  # always named: whether it is a module depends on tying, which transformers decides


def kept_tensors(
    tensors: Iterable[OutputTensor], checkpoint: Checkpoint, attention: Collection[str]
) -> tuple[OutputTensor, ...]:
    """``tensors`` with every weight that can stay quantized replaced by its parts in the source's files.

    Weights of the source's ``attention`` are not, converted or not: engines join its projections and need one form.
    """
    return tuple(part for tensor in tensors for part in _parts(tensor, checkpoint, attention))


def keepable(tensors: Iterable[OutputTensor], checkpoint: Checkpoint, attention: Collection[str]) -> int:
    """The number of ``tensors`` that can stay as the source holds them."""
    return sum(_packed(tensor, checkpoint, attention) is not None for tensor in tensors)


def kept_config(config: Mapping[str, Any], tensors: Iterable[OutputTensor], checkpoint: Checkpoint) -> dict[str, Any]:
    """``config`` with the quantization of the source, for a result with the tensors of `kept_tensors`."""
    assert isinstance(checkpoint.reader, DequantizingReader)
    weights = [tensor for tensor in tensors if len(tensor.shape) == 2 and tensor.name.endswith(".weight")]
    dense = {tensor.name.removesuffix(".weight") for tensor in weights if tensor.kept is None}
    return {**config, "quantization_config": {**checkpoint.reader.settings, _LEFT: sorted({_HEAD, *dense})}}


def _packed(tensor: OutputTensor, checkpoint: Checkpoint, attention: Collection[str]) -> StoredWeight | None:
    """The stored form of a copied weight in the source's files; None if the result cannot hold it so."""
    source, reader = tensor.source, checkpoint.reader
    if not isinstance(source, str) or source in attention or not isinstance(reader, DequantizingReader):
        return None
    return reader.keepable(source)


def _parts(tensor: OutputTensor, checkpoint: Checkpoint, attention: Collection[str]) -> list[OutputTensor]:
    packed = _packed(tensor, checkpoint, attention)
    if packed is None:
        return [tensor]
    stem = tensor.name.removesuffix(packed.format.dense)
    return [
        OutputTensor(stem + end, info.dtype, info.shape, info.name, kept=info) for end, info in packed.parts.items()
    ]
