"""The checkpoint that a conversion will write: its config and tensors, known before any weight is
read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from kvfold.convert.checkpoint.headers import FLOAT_DTYPES, TORCH_NAMES
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.writer import PlannedTensor
from kvfold.convert.families.model import Model

if TYPE_CHECKING:
    from torch import Tensor

STORED_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class OutputCheckpoint:
    """The checkpoint that a conversion will write: its config, and the name, dtype and shape of
    every tensor; no weight has been read.

    kind: its attention, such as ``GQA-8`` or ``MLA 512+64``
    config: the content of config.json; empty for MLA before `with_frequencies`
    tensors: all tensors in file order
    code: the module whose file is included in the checkpoint, or None if transformers' own classes
        can load it
    """

    kind: str
    config: dict[str, Any]
    tensors: tuple[PlannedTensor, ...]
    code: str | None = None

    @cached_property
    def computed_names(self) -> list[list[str]]:
        """For each layer, the names of the tensors that the transform computes; all others are
        copied from the source.
        """
        layers: dict[int, list[str]] = {}
        for tensor in self.tensors:
            # The first number in the name of a tensor of the attention is its layer.
            number = re.search(r"\.(\d+)\.", tensor.name)
            if tensor.source is None and number is not None:
                layers.setdefault(int(number[1]), []).append(tensor.name)
        return [layers[layer] for layer in sorted(layers)]

    def encode_layer(self, layer: int, weights: Any) -> Mapping[str, "Tensor"]:
        """Return the output tensors of ``layer`` that are computed, by their stored names, from its
        converted attention ``weights``.

        They may have any float dtype: the writer casts them to the planned one.
        """
        raise NotImplementedError

    def with_frequencies(self, theta: Sequence[Sequence[float]]) -> Self:
        """Return this MLA checkpoint with its config.json, whose rotary frequencies are ``theta
        [layers][P/2]`` in radians per position. No shape depends on them.
        """
        raise NotImplementedError


def choose_output_dtype(present: str, dtype: str) -> str:
    """Return the safetensors dtype of an output tensor: ``present`` for ``auto``, or the
    requested ``dtype`` (torch's spelling) if the tensor is floating-point.
    """
    return present if dtype == "auto" or present not in FLOAT_DTYPES else STORED_NAMES[dtype]


def choose_computed_dtype(model: Model, checkpoint: Checkpoint, dtype: str) -> str:
    """Return the safetensors dtype of the tensors that a conversion computes: ``dtype``, or for
    ``auto`` that of the source's first query projection.
    """
    return choose_output_dtype(checkpoint.tensors[model.list_attention_tensors(0)[0]].dtype, dtype)
