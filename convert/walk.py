"""The walk: calibration text goes through a model layer by layer, and through its converted twin beside it.

A run reads as ::

    for step in walk(source, twin, held_out, calibration):
        tensors = transform(step.index, step.statistics)   # may ask step.attention_error(candidate)
        step.convert(tensors)

In memory are one layer, its twin and the hidden states. The source stream carries the calibration and the held-out
sequences; the student's carries the held-out ones, and the calibration sequences too when refinement needs them.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.streams import LayerOutput, StreamLayer
from kvfold.convert.errors import KvfoldError
from kvfold.convert.statistics import StatisticsAccumulator
from kvfold.convert.stream import CheckpointStream
from kvfold.convert.transforms.weights import LayerStatistics

_CPU_TOKENS = 4096
_GPU_TOKENS = 32768

Hidden = list[Tensor]  # the residual stream of all sequences, in chunks [b, T, E] of one layer call each


@dataclass(frozen=True)
class Compared:
    """A chunk of held-out sequences through one layer of the source, and of the student.

    ``local`` is the student's layer on the source's hidden states, ``propagated`` on the student's own.
    """

    source: LayerOutput
    local: LayerOutput
    propagated: LayerOutput


Observe = Callable[[int, Compared], None]


class Twin:
    """The converted model as a stream: the source's tensors, but for those that the transform makes.

    ``config`` and ``names`` are the converted checkpoint's, ``computed`` those of its tensors that are new.
    """

    def __init__(
        self, source: CheckpointStream, config: dict[str, Any], names: Collection[str], computed: Collection[str]
    ) -> None:
        self._computed = frozenset(computed)
        self._read_source = source.read
        self._overlay: Mapping[str, Tensor] = {}
        self.stream = CheckpointStream(
            config, self._read, names, source.device, source.dtype, twin=source, changed=self._computed
        )

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a layer's tensors, named and shaped as in the converted checkpoint's files, instead of those before."""
        unknown = sorted(set(tensors) - self._computed)
        if unknown:
            raise KvfoldError(f"the converted checkpoint plans no tensors {', '.join(unknown)}")
        self._overlay = dict(tensors)

    def _read(self, name: str) -> Tensor:
        if name not in self._computed:
            return self._read_source(name)
        if name not in self._overlay:
            raise KvfoldError(f"tensor {name!r} was asked for before its layer was converted")
        return self._overlay[name]


class Step:
    """One layer of a walk, the source's open.

    ``statistics`` are those of the calibration sequences, or None in a walk without them. ``held_out`` is what the
    source's layer is given on the held-out sequences and ``outputs`` what it makes of that, ``student`` what the
    student's is given. ``calibration`` and ``student_calibration`` likewise, empty unless refinement asked for them.
    """

    def __init__(self, index: int, layer: StreamLayer, twin: Twin, held_out: Hidden, student: Hidden) -> None:
        self.index = index
        self.source = layer
        self.statistics: LayerStatistics | None = None
        self.held_out = held_out
        self.outputs: list[LayerOutput] = []
        self.student = student
        self.calibration: Hidden = []
        self.student_calibration: Hidden = []
        self.observe: Observe | None = None
        self.converted = False
        self._twin = twin

    @torch.no_grad()
    def attention_error(self, tensors: Mapping[str, Tensor]) -> float:
        """``||y - y'||^2 / ||y||^2`` of the attention's output on held-out sequences, if ``tensors`` were used."""
        self._twin.put(tensors)
        error = norm = 0.0
        with self._twin.stream.open_layer(self.index) as layer:
            for hidden, output in zip(self.held_out, self.outputs, strict=True):
                error += _energy(layer.attend(hidden).attention - output.attention)
                norm += _energy(output.attention)
        return error / norm if norm else error

    @torch.no_grad()
    def convert(self, tensors: Mapping[str, Tensor]) -> None:
        """Settle on ``tensors``: compare the student's layer with the source's and advance the student's stream."""
        self._twin.put(tensors)
        with self._twin.stream.open_layer(self.index) as layer:
            for chunk, hidden in enumerate(self.held_out):
                propagated = layer(self.student[chunk])
                if self.observe is not None:
                    self.observe(self.index, Compared(self.outputs[chunk], layer(hidden), propagated))
                self.student[chunk] = residual(propagated)
            for chunk, hidden in enumerate(self.student_calibration):
                self.student_calibration[chunk] = residual(layer(hidden))
        self.converted = True


def walk(
    source: CheckpointStream,
    twin: Twin,
    held_out: Tensor,
    calibration: Tensor | None = None,
    *,
    profile: bool = False,
    keep_calibration: bool = False,
    observe: Observe | None = None,
) -> Iterator[Step]:
    """Yield every layer in order; each must be settled with ``step.convert`` before the next.

    ``held_out [M, T]`` and ``calibration [N, T]`` are tokens. ``profile`` adds distance profiles to the statistics;
    ``keep_calibration`` keeps what refinement needs, at twice the memory for hidden states; ``observe`` is shown
    every layer's comparison. Without ``calibration`` only the held-out sequences go through.
    """
    states = embed(source, held_out)
    student = embed(twin.stream, held_out)
    learning = [] if calibration is None else embed(source, calibration)
    student_learning = embed(twin.stream, calibration) if keep_calibration and calibration is not None else []
    for index in range(source.layers):
        with source.open_layer(index) as layer:
            step = Step(index, layer, twin, states, student)
            step.observe = observe
            step.student_calibration = student_learning
            step.calibration = list(learning) if keep_calibration else []
            if learning:
                step.statistics = gather(layer, learning, profile)
            with torch.no_grad():
                step.outputs = [layer(chunk) for chunk in states]
            yield step
            if not step.converted:
                raise KvfoldError(f"the walk went on from layer {index} before it was converted")
            for chunk, output in enumerate(step.outputs):
                states[chunk] = residual(output)
            step.outputs.clear()


def survey(
    source: CheckpointStream, calibration: Tensor, *, profile: bool = True
) -> Iterator[tuple[int, LayerStatistics]]:
    """The statistics of every layer in order, the source model alone: for choices that concern all layers at once."""
    states = embed(source, calibration)
    for index in range(source.layers):
        with source.open_layer(index) as layer:
            statistics = gather(layer, states, profile)
        yield index, statistics


@torch.no_grad()
def gather(layer: StreamLayer, states: Hidden, profile: bool) -> LayerStatistics:
    """The statistics of a layer over ``states``, which move on to its outputs."""
    accumulator = StatisticsAccumulator(profile)
    for chunk, hidden in enumerate(states):
        output = layer(hidden)
        accumulator.add(output)
        states[chunk] = residual(output)
    return accumulator.result()


@torch.no_grad()
def embed(stream: CheckpointStream, tokens: Tensor) -> Hidden:
    """``tokens [N, T]`` as the first layer's inputs, in chunks that suit the stream's device."""
    states = [stream.embed(chunk) for chunk in torch.split(tokens, chunk_size(stream.device, tokens.shape[1]))]
    stream.release()
    return states


def chunk_size(device: torch.device, length: int) -> int:
    """How many sequences of ``length`` one layer call takes."""
    return max(1, (_CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS) // length)


def residual(output: LayerOutput) -> Tensor:
    """The residual stream after a layer that was run whole."""
    if output.hidden is None:
        raise ValueError("output: expected a whole layer's, found one of its attention only")
    return output.hidden


def estimate_seconds(
    source: CheckpointStream, held_out: Tensor, calibration: Tensor | None = None, *, passes: int = 1
) -> float:
    """How long a walk over these tokens will take, from one chunk through the first layer.

    ``passes`` counts how often the calibration sequences go through the model (a survey is one more). The transforms'
    own time is not in it.
    """
    tokens = held_out if calibration is None else calibration
    chunk = tokens[: chunk_size(source.device, tokens.shape[1])]
    states = embed(source, chunk)
    started = time.monotonic()
    with source.open_layer(0) as layer:
        opened = time.monotonic() - started
        gather(layer, states, profile=False)
        _synchronise(source.device)
    each = (time.monotonic() - started - opened) / chunk.numel()
    learned = passes * (0 if calibration is None else calibration.numel())
    return source.layers * (each * (learned + 3 * held_out.numel()) + opened * (passes + 1))


def _energy(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
