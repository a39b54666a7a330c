"""Non-finite activations: the layer in which they begin, and the stored tensor at fault."""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvfold.convert.checkpoint.tensors import refuse_non_finite
from kvfold.convert.errors import InputError, opt
from kvfold.convert.stream.stream import CheckpointStream


def check_finite(states: Iterable[Tensor], stream: CheckpointStream, layer: int | None) -> None:
    """Raises InputError unless ``states`` are finite.

    ``states`` are outputs of ``layer`` for finite inputs, for None of the embeddings or the output head. Stored
    tensors are read only when some are not.
    """
    if all(bool(torch.isfinite(state).all()) for state in states):
        return
    where = "before the first layer or after the last" if layer is None else f"in layer {layer}"
    for name in stream.stored_names(layer):
        consequence = f", which make the activations of calibration text non-finite {where}"
        refuse_non_finite(stream.read(name), f"tensor {name!r}", consequence)
    raise InputError(
        f"expected finite activations of calibration text, found NaN or infinity {where}, although its weights are "
        f"finite: they outgrow {str(stream.dtype).removeprefix('torch.')}; "
        + (
            "the model is damaged"
            if stream.dtype == torch.float32
            else f"use {opt('device', 'cpu')}, which computes in float32"
        )
    )
