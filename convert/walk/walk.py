"""The walk: calibration text goes through a model layer by layer, and through its converted twin beside it.

A run reads as ::

    walk = Walk(source, twin, held_out, calibration)
    for step in walk:
        tensors = transform(step.index, step.statistics)   # may ask step.attention_error(candidate)
        step.convert(tensors)
    walk.measurement()

In memory are one layer, its twin and the hidden states. The source stream carries the calibration and the held-out
sequences; the student's carries the held-out ones, and the calibration sequences too when refinement needs them.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kvfold.attention.drift.lockstep import LayerDrift, Measurement, compare_layer, compare_predictions
from kvfold.attention.drift.recording import OpenLayer
from kvfold.attention.drift.streams import LayerOutput
from kvfold.convert.errors import KvfoldError
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.finite import check_finite
from kvfold.convert.walk.statistics import StatisticsAccumulator
from kvfold.convert.walk.twin import Twin

_CPU_TOKENS = 4096
_GPU_TOKENS = 32768
_JUDGED_TOKENS = 2048
_ESTIMATED_TOKENS = 1024

Hidden = list[Tensor]  # the residual stream of all sequences, in chunks [b, T, E] of one layer call each


class Step:
    """One layer of a walk, the source's open.

    ``statistics`` are those of the calibration sequences, or None in a walk without them. ``held_out`` is what the
    source's layer is given on the held-out sequences and ``outputs`` what it makes of that; ``student`` is what the
    student's is given. ``calibration`` and ``student_calibration`` likewise, empty unless refinement asked for them.
    ``drift`` is how far the converted layer is from the source's, None before ``convert``. ``twin`` is the student.
    """

    def __init__(self, index: int, source: OpenLayer, twin: Twin, held_out: Hidden, student: Hidden) -> None:
        self.index = index
        self.source = source
        self.statistics: LayerStatistics | None = None
        self.held_out = held_out
        self.student = student
        self.calibration: Hidden = []
        self.student_calibration: Hidden = []
        self.drift: LayerDrift | None = None
        self.twin = twin
        with torch.no_grad():
            self.outputs = [source(chunk) for chunk in held_out]

    @torch.no_grad()
    def attention_error(self, tensors: Mapping[str, Tensor]) -> float:
        """``||y - y'||^2 / ||y||^2`` of the attention's output on held-out sequences if ``tensors`` were used.

        The first sequences of about 2048 tokens are looked at: candidates differ alike on all of them.
        """
        self.twin.put(tensors)
        error = norm = 0.0
        left = max(1, _JUDGED_TOKENS // self.held_out[0].shape[1])
        with self.twin.stream.open_layer(self.index) as layer:
            for hidden, output in zip(self.held_out, self.outputs, strict=True):
                expected = output.attention[:left]
                error += _energy(layer.attend(hidden[:left]).attention - expected)
                norm += _energy(expected)
                left -= len(expected)
                if left == 0:
                    break
        return error / norm if norm else error

    @torch.no_grad()
    def convert(self, tensors: Mapping[str, Tensor]) -> LayerDrift:
        """Settle on ``tensors``: compare the student's layer with the source's and take both streams past it."""
        self.twin.put(tensors)
        with self.twin.stream.open_layer(self.index) as layer:
            replayed = _Replayed(self.outputs)
            self.drift = compare_layer(self.index, replayed, layer, self.held_out, self.student, self.twin.stream)
            for chunk, hidden in enumerate(self.student_calibration):
                self.student_calibration[chunk] = residual(layer(hidden))
        self.outputs.clear()
        return self.drift


class _Replayed:
    """A layer that has been run already: gives what it gave then, in the same order."""

    def __init__(self, outputs: list[LayerOutput]) -> None:
        self._outputs = iter(outputs)

    def __call__(self, hidden: Tensor) -> LayerOutput:
        return next(self._outputs)

    def attend(self, hidden: Tensor) -> LayerOutput:
        return replace(next(self._outputs), hidden=None)


class Walk:
    """Iterating yields every layer in order; each must be settled with ``step.convert`` before the next.

    ``held_out [M, T]`` and ``calibration [N, T]`` are tokens. ``profile`` adds distance profiles to the statistics;
    ``keep_calibration`` keeps what refinement needs, at four times the memory for hidden states. Without
    ``calibration`` only the held-out sequences go through.
    """

    def __init__(
        self,
        source: CheckpointStream,
        twin: Twin,
        held_out: Tensor,
        calibration: Tensor | None = None,
        *,
        profile: bool = False,
        keep_calibration: bool = False,
    ) -> None:
        self._source, self._twin = source, twin
        self._tokens = torch.split(held_out, chunk_size(source.device, held_out.shape[1]))
        self._profile = profile
        self._keep = keep_calibration and calibration is not None
        self._states = embed(source, held_out)
        self._calibration = [] if calibration is None else embed(source, calibration)
        self._student = embed(twin.stream, held_out)
        self._student_calibration = [] if calibration is None or not self._keep else embed(twin.stream, calibration)
        self.drifts: list[LayerDrift] = []

    def __iter__(self) -> Iterator[Step]:
        for index in range(len(self.drifts), self._source.layers):
            with self._source.open_layer(index) as layer:
                kept = list(self._calibration) if self._keep else []
                statistics = self._gathered(layer)
                step = Step(index, layer, self._twin, self._states, self._student)
                step.statistics, step.calibration = statistics, kept
                step.student_calibration = self._student_calibration
                check_finite((residual(output) for output in step.outputs), self._source, index)
                yield step
                if step.drift is None:
                    raise KvfoldError(f"the walk went on from layer {index} before it was converted")
                self.drifts.append(step.drift)

    def _gathered(self, layer: OpenLayer) -> LayerStatistics | None:
        return gather(self._source, layer, self._calibration, self._profile)[0] if self._calibration else None

    @torch.no_grad()
    def measurement(self) -> Measurement:
        """The whole converted model against its source on the held-out sequences, after the last layer."""
        if len(self.drifts) < self._source.layers:
            raise KvfoldError(f"the walk has done {len(self.drifts)} of {self._source.layers} layers")
        found = compare_predictions(self._source, self._twin.stream, self._states, self._student, self._tokens)
        check_finite([torch.tensor(found.teacher_loss)], self._source, None)
        self._source.release()
        self._twin.stream.release()
        return replace(found, layers=tuple(self.drifts))


def survey(
    source: CheckpointStream, calibration: Tensor, *, profile: bool = True
) -> Iterator[tuple[int, LayerStatistics, Tensor]]:
    """Every layer in order, the source model alone: for choices that concern all layers at once.

    Yields its index, its statistics, and its attention's inputs for the first chunk of tokens, ``[n, E]``.
    """
    states = embed(source, calibration)
    for index in range(source.layers):
        with source.open_layer(index) as layer:
            statistics, inputs = gather(source, layer, states, profile)
        yield index, statistics, inputs


@torch.no_grad()
def gather(source: CheckpointStream, layer: OpenLayer, states: Hidden, profile: bool) -> tuple[LayerStatistics, Tensor]:
    """The statistics of a layer over ``states``, which move on to its outputs, and what the first chunk's attention
    was given, ``[n, E]``. Raises InputError when the outputs are not finite."""
    accumulator = StatisticsAccumulator(profile)
    inputs: Tensor | None = None
    for chunk, hidden in enumerate(states):
        output = layer(hidden)
        accumulator.add(output)
        inputs = output.attention_input.flatten(0, -2) if inputs is None else inputs
        states[chunk] = residual(output)
    if inputs is None:
        raise ValueError("states: expected at least one chunk, found none")
    check_finite(states, source, layer.index)
    return accumulator.result(), inputs


@torch.no_grad()
def embed(stream: CheckpointStream, tokens: Tensor) -> Hidden:
    """``tokens [N, T]`` as the first layer's inputs, in chunks that suit the stream's device."""
    states = [stream.embed(chunk) for chunk in torch.split(tokens, chunk_size(stream.device, tokens.shape[1]))]
    stream.release()
    check_finite(states, stream, None)
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
    """How long a walk over these tokens will take, from a few sequences through the first layer.

    ``passes`` counts how often the calibration sequences go through the model (a survey is one more). The transforms'
    own time is not in it.
    """
    tokens = held_out if calibration is None else calibration
    chunk = tokens[: max(1, min(chunk_size(source.device, tokens.shape[1]), _ESTIMATED_TOKENS // tokens.shape[1]))]
    states = embed(source, chunk)
    started = time.monotonic()
    with source.open_layer(0) as layer:
        opened = time.monotonic() - started
        gather(source, layer, states, profile=False)
        _synchronise(source.device)
    each = (time.monotonic() - started - opened) / chunk.numel()
    learned = passes * (0 if calibration is None else calibration.numel())
    # held out: once through the source, twice through the student, judging candidates, reading back, rounding floor
    return source.layers * (each * (learned + 5 * held_out.numel()) + opened * (passes + 3))


def _energy(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
