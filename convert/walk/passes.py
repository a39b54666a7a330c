"""Runs one model layer by layer over residual streams in chunks, and collects statistics of each
layer.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvfold.attention.drift.recording import LayerOutput, OpenLayer
from kvfold.convert import processes
from kvfold.convert.checkpoint.tensors import refuse_non_finite
from kvfold.convert.errors import InputError
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.hidden import Hidden, Keep, Recomputed
from kvfold.convert.walk.statistics import ReadHeads, StatisticsAccumulator, with_heads

# Tokens per layer call: a trade-off between the size of matrix products and the memory for
# activations. GQA-2 of the model that ships: 512 7.6 s, 4096 7.3 s, 16384 7.7 s, and equal losses:
# flat (bench_refine_constants.py, 2026-11-24). On a GPU chosen, not tuned.
_CPU_TOKENS = 4096
_GPU_TOKENS = 32768


@torch.no_grad()
def gather(
    source: CheckpointStream, layer: OpenLayer, states: Hidden, heads: ReadHeads | None = None
) -> tuple[LayerStatistics, Tensor]:
    """Return a layer's statistics over ``states``, and its attention inputs for the first chunk,
    ``[n, E]``.

    Both cover the sequences of all processes. ``heads`` reads a layer's attention weights; it is
    needed for statistics of normalized queries and keys, and for attention whose queries and keys
    cannot be recorded. ``states`` are replaced by the layer's outputs. Raises InputError if these
    are not finite.
    """
    source_heads = None if heads is None else heads(layer.index)
    accumulator = StatisticsAccumulator(
        weights=None if source_heads is None else source_heads.weights
    )
    inputs = torch.empty(0)
    for chunk, hidden in enumerate(states):
        with source.training():
            output = layer(hidden)
        accumulator.add(
            output
            if source_heads is None
            else with_heads(output, source_heads, layer.arguments(hidden))
        )
        inputs = output.attention_input.flatten(0, -2) if chunk == 0 else inputs
        states[chunk] = output.states
    statistics = accumulator.result()
    check_finite(states, source, layer.index)
    length = states[0].shape[1]
    return statistics, processes.first_rows(inputs, length * chunk_size(source.device, length))


@torch.no_grad()
def advance(source: CheckpointStream, layer: OpenLayer, states: Hidden) -> None:
    """Replace ``states`` by the layer's outputs. Raises InputError if these are not finite."""
    for chunk, hidden in enumerate(states):
        states[chunk] = layer(hidden).states
    check_finite(states, source, layer.index)


@torch.no_grad()
def through(layer: OpenLayer, states: Hidden) -> tuple[Hidden, Iterable[LayerOutput]]:
    """Run ``layer`` on ``states`` without changing them; return the states after it and the layer's
    outputs.
    """
    after = states[:0]
    outputs = list[LayerOutput]()
    for chunk in states:
        output = layer(chunk)
        after.append(output.states)
        # Outputs take several times the memory of states: if states are in a file, recompute
        # outputs instead.
        if isinstance(states, list):
            outputs.append(output)
    return after, outputs if isinstance(states, list) else Recomputed(layer, states)


@torch.no_grad()
def last_states(stream: CheckpointStream, tokens: Tensor, keep: Keep = list) -> Hidden:
    """The residual streams after the last layer for ``tokens [N, T]``, in chunks; loads one layer
    at a time.
    """
    states = embed(stream, tokens, keep)
    for index in range(stream.layers):
        with stream.open_layer(index) as layer:
            advance(stream, layer, states)
    return states


@torch.no_grad()
def embed(stream: CheckpointStream, tokens: Tensor, keep: Keep = list) -> Hidden:
    """Embed ``tokens [N, T]`` as inputs of the first layer, in chunks sized for the stream's
    device.
    """
    states = keep(
        map(stream.embed, torch.split(tokens, chunk_size(stream.device, tokens.shape[1])))
    )
    stream.release()
    check_finite(states, stream, None)
    return states


def chunk_size(device: torch.device, length: int) -> int:
    """The number of sequences with ``length`` tokens in one layer call."""
    return max(1, (_CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS) // length)


def check_finite(states: Iterable[Tensor], stream: CheckpointStream, layer: int | None) -> None:
    """Raise InputError unless ``states`` are finite; name the stored tensor at fault.

    ``states`` are the outputs of ``layer`` for finite inputs; None means the embeddings or the
    output head.
    """
    finite = [torch.isfinite(state).all() for state in states]
    if not finite or torch.stack(finite).all():
        return
    where = "before the first layer or after the last" if layer is None else f"in layer {layer}"
    # Read stored tensors only after a failure: checking all of them would take as long as the
    # conversion.
    for name in stream.stored_names(layer):
        consequence = f", so activations of the calibration text {where} are not finite"
        refuse_non_finite(stream.read(name), f"tensor {name!r}", consequence)
    raise InputError(
        f"calibration text produces NaN or infinite activations {where}, although the weights are"
        " finite: activations must fit into float32; the model is probably damaged: use another"
        " copy of the checkpoint"
    )
