"""The checkpoint that a conversion writes, known before any weight is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TORCH_NAMES
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.writer import OutputTensor
from kvfold.convert.families.model import Model

if TYPE_CHECKING:
    from torch import Tensor

_STORED = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class OutputCheckpoint:
    """A checkpoint that a conversion will write, planned before any weight is read.

    kind: its attention, such as ``GQA-8`` or ``MLA 512+64``
    config: the content of config.json; empty for MLA before `with_frequencies`
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

    def encode_layer(self, layer: int, weights: Any) -> Mapping[str, "Tensor"]:
        """The tensors ``computed[layer]`` by name, from the converted ``weights`` of the layer.

        They may have any float dtype: the writer casts them to the planned one.
        """
        raise NotImplementedError

    def with_frequencies(self, theta: Sequence[Sequence[float]]) -> Self:
        """This MLA checkpoint with its config, whose rotary frequencies are ``theta [layers][P/2]``
        in radians per position. No shape depends on them.
        """
        raise NotImplementedError


def choose_output_dtype(present: str, dtype: str | None) -> str:
    """The safetensors dtype of an output tensor: ``present``, or ``dtype`` (torch's spelling) for
    floats if given.
    """
    return present if dtype is None or present not in FLOAT_DTYPES else _STORED[dtype]


def choose_computed_dtype(model: Model, checkpoint: Checkpoint, dtype: str | None) -> str:
    """The safetensors dtype of the tensors that a transform computes: that of the first query
    projection, or ``dtype``.
    """
    return choose_output_dtype(checkpoint.tensors[model.list_attention_tensors(0)[0]].dtype, dtype)
