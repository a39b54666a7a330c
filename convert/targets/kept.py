"""Weights that a conversion only copies, as a quantized source holds them; no torch.

Stock classes read them so beside dense attention: ``modules_to_not_convert`` of the config names what is dense. A
source's other weights, and what its class stores in another form than the result's, are dequantized as always.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kvfold.convert.checkpoint.dequantized import DequantizingReader
from kvfold.convert.checkpoint.formats import StoredWeight
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.shards import OutputTensor

_LEFT = "modules_to_not_convert"
_HEAD = "lm_head"  # named in any case: transformers ties it or not


def kept_tensors(
    tensors: Iterable[OutputTensor], checkpoint: Checkpoint, attention: Collection[str]
) -> tuple[OutputTensor, ...]:
    """``tensors`` with the parts that the files hold in place of every weight that can stay quantized.

    Not those of the source's ``attention``, converted or not: engines join its projections and want them alike.
    """
    return tuple(part for tensor in tensors for part in _parts(tensor, checkpoint, attention))


def keepable(tensors: Iterable[OutputTensor], checkpoint: Checkpoint, attention: Collection[str]) -> int:
    """How many of ``tensors`` can stay as the source holds them."""
    return sum(_packed(tensor, checkpoint, attention) is not None for tensor in tensors)


def kept_config(config: Mapping[str, Any], tensors: Iterable[OutputTensor], checkpoint: Checkpoint) -> dict[str, Any]:
    """``config`` of a result that holds ``tensors`` of ``kept_tensors``: quantized as the source, its dense matrices
    named."""
    assert isinstance(checkpoint.reader, DequantizingReader)
    weights = [tensor for tensor in tensors if len(tensor.shape) == 2 and tensor.name.endswith(".weight")]
    dense = {tensor.name.removesuffix(".weight") for tensor in weights if tensor.kept is None}
    return {**config, "quantization_config": {**checkpoint.reader.settings, _LEFT: sorted({_HEAD, *dense})}}


def _packed(tensor: OutputTensor, checkpoint: Checkpoint, attention: Collection[str]) -> StoredWeight | None:
    """What a copied weight is in the source's files, where a result may hold it so."""
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
