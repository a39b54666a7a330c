"""One model on its own, layer by layer: its residual streams in chunks, and what they show of each layer."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from kvfold.attention.drift.recording import LayerOutput, OpenLayer
from kvfold.convert import processes
from kvfold.convert.checkpoint.tensors import refuse_non_finite
from kvfold.convert.errors import InputError, opt
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.hidden import Hidden, Keep, Recomputed
from kvfold.convert.walk.statistics import ReadHeads, StatisticsAccumulator, with_heads

# Tokens of one layer call: a choice between the size of matrix products and the memory of activations.
_CPU_TOKENS = 4096
_GPU_TOKENS = 32768


def survey(
    source: CheckpointStream,
    calibration: Tensor,
    *,
    profile: bool = True,
    heads: ReadHeads | None = None,
    keep: Keep = list,
) -> Iterator[tuple[int, LayerStatistics, Tensor]]:
    """Every layer in order, the source alone: calibration for choices that concern all layers at once.

    Yields its index, its statistics, and its attention's inputs for the first chunk of tokens, ``[n, E]``. ``heads``
    reads a layer's attention, for statistics of what is behind norms on queries and keys, and of attention that shows
    none of its queries and keys. ``keep`` says where hidden states are, in memory or in a file.
    """
    states = embed(source, calibration, keep)
    for index in range(source.layers):
        with source.open_layer(index) as layer:
            statistics, inputs = gather(source, layer, states, profile, heads)
        yield index, statistics, inputs


@torch.no_grad()
def gather(
    source: CheckpointStream, layer: OpenLayer, states: Hidden, profile: bool, heads: ReadHeads | None = None
) -> tuple[LayerStatistics, Tensor]:
    """The statistics of a layer over ``states``, and its attention's inputs for the first chunk, ``[n, E]``.

    Both are of the sequences of all processes. ``states`` are replaced by the layer's outputs. Raises InputError when
    these are not finite.
    """
    source_heads = None if heads is None else heads(layer.index)
    accumulator = StatisticsAccumulator(profile, None if source_heads is None else source_heads.weights)
    inputs = torch.empty(0)
    for chunk, hidden in enumerate(states):
        output = layer(hidden)
        accumulator.add(output if source_heads is None else with_heads(output, source_heads, layer.arguments(hidden)))
        inputs = output.attention_input.flatten(0, -2) if chunk == 0 else inputs
        states[chunk] = output.states
    statistics = accumulator.result()
    check_finite(states, source, layer.index)
    length = states[0].shape[1]
    return statistics, processes.first_rows(inputs, length * chunk_size(source.device, length))


@torch.no_grad()
def advance(source: CheckpointStream, layer: OpenLayer, states: Hidden) -> None:
    """Replace ``states`` by the layer's outputs. Raises InputError when these are not finite."""
    for chunk, hidden in enumerate(states):
        states[chunk] = layer(hidden).states
    check_finite(states, source, layer.index)


@torch.no_grad()
def through(layer: OpenLayer, states: Hidden) -> tuple[Hidden, Iterable[LayerOutput]]:
    """The states after ``layer``, with ``states`` left as they are, and its outputs."""
    after, outputs = states[:0], list[LayerOutput]()
    for chunk in states:
        output = layer(chunk)
        after.append(output.states)
        # Outputs take several times the room of states: where these are in a file, they are run again.
        if isinstance(states, list):
            outputs.append(output)
    return after, outputs if isinstance(states, list) else Recomputed(layer, states)


@torch.no_grad()
def last_states(stream: CheckpointStream, tokens: Tensor, keep: Keep = list) -> Hidden:
    """The residual streams of ``tokens [N, T]`` after the last layer, one layer in memory at a time, in chunks."""
    states = embed(stream, tokens, keep)
    for index in range(stream.layers):
        with stream.open_layer(index) as layer:
            advance(stream, layer, states)
    return states


@torch.no_grad()
def embed(stream: CheckpointStream, tokens: Tensor, keep: Keep = list) -> Hidden:
    """``tokens [N, T]`` as the first layer's inputs, in chunks that suit the stream's device."""
    states = keep(map(stream.embed, torch.split(tokens, chunk_size(stream.device, tokens.shape[1]))))
    stream.release()
    check_finite(states, stream, None)
    return states


def chunk_size(device: torch.device, length: int) -> int:
    """The number of sequences of ``length`` tokens in one layer call."""
    return max(1, (_CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS) // length)


def check_finite(states: Iterable[Tensor], stream: CheckpointStream, layer: int | None) -> None:
    """Raises InputError unless ``states`` are finite; it names the stored tensor at fault.

    ``states`` are outputs of ``layer`` for finite inputs, for None of the embeddings or the output head.
    """
    if all(bool(torch.isfinite(state).all()) for state in states):
        return
    where = "before the first layer or after the last" if layer is None else f"in layer {layer}"
    # Stored tensors are read only now: on the way of every conversion that would take as long as a conversion.
    for name in stream.stored_names(layer):
        consequence = f", which make the activations of calibration text non-finite {where}"
        refuse_non_finite(stream.read(name), f"tensor {name!r}", consequence)
    dtype = str(stream.dtype).removeprefix("torch.")
    way_out = "the model is damaged"
    if stream.dtype != torch.float32:
        way_out = f"use {opt('device', 'cpu')}, which computes in float32"
    raise InputError(
        f"calibration text gives NaN or infinite activations {where}, although its weights are finite: activations "
        f"must fit into {dtype}; {way_out}"
    )
