"""Runs text through a model and its converted student side by side, layer by layer.

::

                        layer 0          walk layer l                    after the last layer
    teacher  embed --> [  T_0  ] ... h --> [  T_l  ] --> ...         --> logits --.
                                           |  ^ statistics of its inputs          +--> measurement
                                  transform|  v error                             |
    student  embed --> [  S_0  ] ... h' -> [  S_l  ] --> ...         --> logits --'
                                           ^ tensors, as stored in the files

Glossary:

    teacher        the source model; it runs each layer once, for any number of students
    student        the converted model, run from the tensors that its files will contain, before
                   they are complete
    walk           one pass of a student through all layers, alongside its teacher
    walk layer     one layer of a walk, open in both models; the student advances through it,
                   converted or unchanged
    hidden states  residual streams ``[b, T, E]`` of a few sequences each; in the host's memory, as
                   those of all tokens need more than a layer; layers move them to their device
    calibration    the sequences on which fits and refinement are trained
    held-out       sequences never used for training, on which errors and drift are measured

A run with one student::

    walk = Walk(Teacher(source, held_out, calibration), student)
    for walk_layer in walk:
        weights = transform(walk_layer.index, walk_layer.statistics)
        walk_layer.advance_student(output.encode_layer(walk_layer.index, weights))
    walk.measure_drift()

Several students can share one teacher, which runs each of its layers once for all of them::

    for layer in teacher.run_layers():
        for walk in walks:
            WalkLayer(layer, walk).advance_student(...)

Memory holds one layer of each model, and the hidden states. The student runs the calibration
sequences only if a fit or refinement needs them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.drift.compare import (
    DriftMeasurement,
    LayerDrift,
    compare_batch,
    compare_predictions,
    make_layer_drift,
    sum_squares,
)
from kvfold.attention.drift.recording import LayerOutput, OpenLayer
from kvfold.convert.checkpoint.tensors import TORCH_DTYPES, refuse_non_finite
from kvfold.convert.errors import InputError
from kvfold.convert.families.layer_io import read_attention_weights
from kvfold.convert.families.model import Model
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.targets.output_checkpoint import OutputCheckpoint
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.statistics import StatisticsAccumulator, compute_queries_and_keys

HiddenStates = list[Tensor]

# Tokens per layer call: a trade-off between the size of matrix products and the memory for
# activations. GQA-2 of the model that ships: 512 7.6 s, 4096 7.3 s, 16384 7.7 s, and equal losses:
# flat (measured by a script in git history, 2026-11-24). On a GPU chosen, not tuned: activations of
# an 8B model's MLP take 2 GB.
_CPU_TOKENS = 4096
_GPU_TOKENS = 8192
# Tokens on which candidates for a layer are compared. GQA-2 of the model that ships: 256 +0.0322
# nats per token, 2048 +0.0284 (measured by a script in git history, 2026-11-24)
_JUDGED_TOKENS = 2048


@dataclass
class TeacherLayer:
    """An open layer of the source model with its inputs and outputs, to which students compare
    theirs.

    index: the number of the layer.
    layer: the layer itself, in memory.
    held_out: the residual streams before it on the held-out sequences.
    outputs: its results for ``held_out``.
    calibration: the residual streams before it on the calibration sequences.
    attention: its attention's outputs for ``calibration``.
    statistics: of its attention inputs on the calibration sequences; None if not computed.
    inputs: these attention inputs ``[n, E]`` for some of the tokens; None if not computed.
    """

    index: int
    layer: OpenLayer
    held_out: HiddenStates
    outputs: list[LayerOutput]
    calibration: HiddenStates
    attention: list[Tensor]
    statistics: LayerStatistics | None = None
    inputs: Tensor | None = None


class Teacher:
    """The source model in a walk: each layer runs once, for any number of students.

    ``held_out [M, T]`` and ``calibration [N, T]`` are token ids; without ``calibration`` only the
    held-out sequences are run. Statistics begin with layer ``statistics_from``; ``model`` as in
    `gather_statistics`.
    """

    def __init__(
        self,
        source: CheckpointStream,
        held_out: Tensor,
        calibration: Tensor | None = None,
        model: Model | None = None,
        statistics_from: int = 0,
    ) -> None:
        self.stream = source
        self.tokens = held_out
        self.calibration_tokens = calibration
        self._model = model
        self._statistics_from = statistics_from
        self.held_out = embed_tokens(source, held_out)
        self._calibration = [] if calibration is None else embed_tokens(source, calibration)

    def run_layers(self) -> Iterator[TeacherLayer]:
        """Yield every layer in order, after running it. Raises InputError if its outputs are not
        finite.
        """
        for index in range(self.stream.layers):
            with self.stream.open_layer(index) as layer:
                opened = self._run_layer(layer)
                yield opened
                # The caller still references the layer while the next one runs.
                opened.outputs.clear()
                opened.attention.clear()
                opened.calibration.clear()
        self._calibration.clear()

    def _run_layer(self, layer: OpenLayer) -> TeacherLayer:
        """Run ``layer`` on the calibration and held-out sequences, and return it with its outputs
        and statistics.
        """
        opened = TeacherLayer(layer.index, layer, self.held_out, [], self._calibration[:], [])
        if self._calibration and layer.index >= self._statistics_from:
            opened.statistics, opened.inputs = gather_statistics(
                self.stream, layer, self._calibration, self._model, opened.attention
            )
        else:
            with self.stream.use_training_precision():
                run_layer(self.stream, layer, self._calibration, opened.attention)
        with torch.no_grad():
            # Without the recordings, which are larger than both together.
            opened.outputs = [
                replace(layer(chunk), query=None, key=None, context=None) for chunk in self.held_out
            ]
        self.held_out = [output.states for output in opened.outputs]
        check_finite(self.held_out, self.stream, layer.index)
        return opened


class Student:
    """The converted model, whose layers can be run before its checkpoint is complete.

    It always runs from the tensors in its files. A candidate for a layer is encoded into the
    tensors of the converted checkpoint, rounded to the dtype in which they will be stored, and read
    back through the same weight map and the same stock module that will load the finished files::

        transform -> output.encode_layer -> Student.set_layer_tensors
        -> read(name), rounded -> WeightMap -> stock module -> error, loss

    So every error, drift and loss in a walk is that of the written checkpoint, and refinement
    trains the stored weights.

    ``output`` describes the converted checkpoint. Copied tensors are read from the source, computed
    tensors are the last ones passed to ``set_layer_tensors``; all are rounded to the stored
    ``dtypes``. Copied tensors share memory with the source's open layer, unless ``recast`` says
    that the checkpoint will store another dtype. ``rounding`` is that of the student's KV cache
    (`attention.cache_rounding`).
    """

    def __init__(
        self,
        source: CheckpointStream,
        output: OutputCheckpoint,
        recast: bool = False,
        rounding: str | None = None,
    ) -> None:
        self.output = output
        self._planned = {tensor.name: tensor for tensor in output.tensors}
        self._read_source = source.read
        self._layer_tensors: Mapping[str, Tensor] = {}
        self.dtypes = {name: TORCH_DTYPES[tensor.dtype] for name, tensor in self._planned.items()}
        # The student shares the tensors of the source's open layer that both checkpoints store
        # identically.
        origins = {name: tensor.sources for name, tensor in self._planned.items() if tensor.sources}
        changed = self._planned.keys() if recast else self._planned.keys() - origins.keys()
        self.stream = CheckpointStream(
            output.config,
            self._read_tensor,
            list(self._planned),
            source.device,
            source.dtype,
            teacher=source,
            changed=changed,
            origins=origins,
            autocast=source.autocast,
            rounding=rounding,
        )

    def set_layer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the computed tensors of the converted layer that is run next, named and shaped as in
        the converted files.
        """
        self._layer_tensors = tensors

    def _read_tensor(self, name: str) -> Tensor:
        """Return the tensor that the converted checkpoint will contain under ``name``."""
        planned = self._planned[name]
        if planned.source is None:
            tensor = self._layer_tensors[name]
        elif isinstance(planned.source, str):
            tensor = self._read_source(planned.source)
        elif planned.sources:
            # Concatenate the elements of several source tensors.
            flat = [self._read_source(source).flatten() for source in planned.sources]
            tensor = torch.cat(flat).view(planned.shape)
        else:
            tensor = torch.zeros(planned.shape)
        return tensor.to(self.dtypes[name])


class Walk:
    """One pass of a student through all layers alongside its teacher; iterating yields a
    `WalkLayer` per layer.

    The student runs the calibration sequences if the teacher does. Do not iterate over walks
    that share a teacher: make a `WalkLayer` of every walk for each of the teacher's layers instead.
    """

    def __init__(self, teacher: Teacher, student: Student) -> None:
        self.teacher = teacher
        self.student = student
        self.held_out = embed_tokens(student.stream, teacher.tokens)
        tokens = teacher.calibration_tokens
        self.calibration = [] if tokens is None else embed_tokens(student.stream, tokens)
        self.drifts: list[LayerDrift] = []

    def __iter__(self) -> "Iterator[WalkLayer]":
        """Yield a `WalkLayer` for each layer, in order."""
        for layer in self.teacher.run_layers():
            yield WalkLayer(layer, self)
        self.calibration.clear()

    @torch.no_grad()
    def measure_drift(self, progress: Callable[[int], None] = lambda _: None) -> DriftMeasurement:
        """Return the drift of the whole student from the teacher on the held-out sequences, with
        that of the layers that were compared (`WalkLayer.advance_student`); call it after the last
        layer. Calls ``progress`` as `compare_predictions` does.
        """
        source = self.teacher.stream
        student = self.student.stream
        tokens = self.teacher.tokens
        chunks = torch.split(tokens, choose_sequences_per_chunk(source.device, tokens.shape[1]))
        measured = compare_predictions(
            source, student, self.teacher.held_out, self.held_out, chunks, progress
        )
        check_finite([torch.tensor(measured.teacher_loss)], source, None)
        source.release()
        student.release()
        return replace(measured, layers=tuple(self.drifts))


class WalkLayer:
    """One layer of a walk, open in the teacher, to be converted or left unchanged in the student.

    Call one of `advance_student` and `advance_student_unchanged`: both residual streams have then
    passed the layer. ``statistics`` and ``inputs`` are the teacher layer's (`TeacherLayer`).
    ``held_out`` and ``calibration`` are the student's residual streams before the layer.
    """

    def __init__(self, teacher: TeacherLayer, walk: Walk) -> None:
        self.index = teacher.index
        self.teacher = teacher
        self.student = walk.student
        self.statistics = teacher.statistics
        self.inputs = teacher.inputs
        self.held_out = walk.held_out
        self.calibration = walk.calibration
        self._drifts = walk.drifts

    @torch.no_grad()
    def measure_error(self, weights: Any) -> float:
        """Return the relative squared error ``||y - y'||^2 / ||y||^2`` of the attention output on
        held-out sequences if the layer had the candidate ``weights``.

        Only the first 2048 or so tokens are used: candidates rank the same on more text.
        """
        # Files are encoded in the host's memory, wherever the candidate was fitted.
        encoded = self.student.output.encode_layer(self.index, weights.to("cpu"))
        self.student.set_layer_tensors(encoded)
        sums = torch.zeros(2, dtype=torch.float64, device=self.student.stream.device)
        left = max(1, _JUDGED_TOKENS // self.teacher.held_out[0].shape[1])
        with self.student.stream.open_layer(self.index) as layer:
            for hidden, output in zip(self.teacher.held_out, self.teacher.outputs, strict=True):
                if left > 0:
                    expected = output.attention[:left]
                    wrong = layer.attend(hidden[:left]).attention - expected
                    errors = torch.stack([sum_squares(wrong), sum_squares(expected)])
                    sums += errors.to(sums.device)
                    left -= len(expected)
        error, norm = sums.tolist()
        return float(error / norm if norm else error)

    @torch.no_grad()
    def advance_student(self, tensors: Mapping[str, Tensor], compare: bool = False) -> None:
        """Set the layer's converted ``tensors``, and run the student's residual streams through the
        layer. With ``compare``, the walk records the drift of the layer.
        """
        self.student.set_layer_tensors(tensors)
        with self.student.stream.open_layer(self.index) as layer:
            if compare:
                self._drifts.append(self._compare_and_advance(layer))
            else:
                self.held_out[:] = [layer(hidden).states for hidden in self.held_out]
            self._advance_calibration(layer)

    def _compare_and_advance(self, layer: OpenLayer) -> LayerDrift:
        """Run the student's residual streams of the held-out sequences through ``layer``, and
        return its drift from the teacher's.
        """
        errors = []
        streams = zip(self.teacher.held_out, self.teacher.outputs, strict=True)
        for chunk, (hidden, output) in enumerate(streams):
            error, self.held_out[chunk] = compare_batch(output, layer, hidden, self.held_out[chunk])
            errors.append(error)
        return make_layer_drift(errors)

    @torch.no_grad()
    def advance_student_unchanged(self) -> None:
        """Leave the student's layer as in the source, and run the student's residual streams
        through it.
        """
        layer = self.teacher.layer
        for chunk, output in enumerate(self.teacher.outputs):
            # Before the first converted layer both streams are identical, so the student reuses the
            # teacher's outputs.
            hidden = self.held_out[chunk]
            same = torch.equal(self.teacher.held_out[chunk], hidden)
            self.held_out[chunk] = output.states if same else layer(hidden).states
        self._advance_calibration(layer)

    def _advance_calibration(self, layer: OpenLayer) -> None:
        """Run the student's residual streams of the calibration sequences through ``layer``."""
        # Nothing is fitted after the last layer.
        if self.index + 1 < self.student.stream.layers:
            with self.student.stream.use_training_precision():
                for chunk, hidden in enumerate(self.calibration):
                    self.calibration[chunk] = layer(hidden).states.cpu()


@torch.no_grad()
def gather_statistics(
    source: CheckpointStream,
    layer: OpenLayer,
    states: HiddenStates,
    model: Model | None = None,
    attention: list[Tensor] | None = None,
) -> tuple[LayerStatistics, Tensor]:
    """Return a layer's calibration statistics for the residual streams ``states``, and its
    attention inputs for the first chunk, ``[n, E]``.

    ``model`` says where the layer's attention weights are; it is needed for statistics of
    normalized queries and keys, and for attention whose queries and keys cannot be recorded.
    ``states`` are replaced by the layer's outputs, in the last layer by those of its attention, as
    nothing reads what follows. Outputs of the attention are added to ``attention``, if it is given.
    Raises InputError if outputs are not finite.
    """
    last = layer.index + 1 == source.layers
    weights = None
    if model is not None and (model.qk_norm is not None or not model.family.attention.shown):
        weights = read_attention_weights(model, layer.index, source.read)
    accumulator = StatisticsAccumulator(weights=weights)
    inputs = torch.empty(0)
    for chunk, hidden in enumerate(states):
        with source.use_training_precision():
            output = layer(hidden, whole=not last)
        if output.query is None and model is not None and weights is not None:
            output = compute_queries_and_keys(
                output, weights, model, layer.index, layer.arguments(hidden)
            )
        accumulator.add_batch(output)
        if chunk == 0:
            inputs = output.attention_input.flatten(0, -2)
        if attention is not None:
            attention.append(output.attention.cpu())
        states[chunk] = (output.attention if last else output.states).cpu()
    statistics = accumulator.average_batches()
    check_finite(states, source, layer.index)
    return statistics, inputs


@torch.no_grad()
def run_layer(
    source: CheckpointStream, layer: OpenLayer, states: HiddenStates, attention: list[Tensor] | None
) -> None:
    """Replace the residual streams ``states`` by the layer's outputs, and append its attention's
    outputs to ``attention``, if it is given. Raises InputError if the outputs are not finite.
    """
    for chunk, hidden in enumerate(states):
        output = layer(hidden)
        states[chunk] = output.states.cpu()
        if attention is not None:
            attention.append(output.attention.cpu())
    check_finite(states, source, layer.index)


@torch.no_grad()
def run_all_layers(
    stream: CheckpointStream, tokens: Tensor, progress: Callable[[], None]
) -> HiddenStates:
    """Return the residual streams after the last layer for ``tokens [N, T]``, in chunks; one layer
    is in memory at a time. Calls ``progress()`` after each layer.
    """
    states = embed_tokens(stream, tokens)
    for index in range(stream.layers):
        with stream.open_layer(index) as layer:
            run_layer(stream, layer, states, None)
        progress()
    return states


@torch.no_grad()
def embed_tokens(stream: CheckpointStream, tokens: Tensor) -> HiddenStates:
    """Return the residual streams before the first layer for ``tokens [N, T]``, in chunks sized for
    the stream's device.
    """
    chunks = torch.split(tokens, choose_sequences_per_chunk(stream.device, tokens.shape[1]))
    states = [stream.embed(chunk).cpu() for chunk in chunks]
    stream.release()
    check_finite(states, stream, None)
    return states


def choose_sequences_per_chunk(device: torch.device, length: int) -> int:
    """Return how many sequences of ``length`` tokens go through a layer in one call."""
    return max(1, (_CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS) // length)


def check_finite(states: Iterable[Tensor], stream: CheckpointStream, layer: int | None) -> None:
    """Raise InputError if ``states`` contain NaN or infinity; the message names the stored tensor
    at fault.

    ``states`` are the outputs of ``layer`` for finite inputs; None means the embeddings or the
    output head.
    """
    finite = [torch.isfinite(state).all() for state in states]
    if not finite or torch.stack(finite).all():
        return
    where = "before the first layer or after the last" if layer is None else f"in layer {layer}"
    # Read stored tensors only after a failure: checking all of them would take as long as the
    # conversion.
    for name in stream.list_stored_names(layer):
        consequence = f", so activations of the calibration text {where} are not finite"
        refuse_non_finite(stream.read(name), f"tensor {name!r}", consequence)
    raise InputError(
        f"calibration text produces NaN or infinite activations {where}, although the weights are"
        " finite: activations must fit into float32; the model is probably damaged: use another"
        " copy of the checkpoint"
    )
