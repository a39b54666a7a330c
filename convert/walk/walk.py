"""The walk: text goes through a model layer by layer, and through its converted student at the same time.

::

                          layer 0          Step: layer l                    after the last layer
    teacher    embed --> [  T_0  ] ... h --> [  T_l  ] --> ...              --> logits --.
                                             |  ^ statistics of its inputs               +--> measurement
                                    transform|  v drift                                  |
    student    embed --> [  S_0  ] ... h' -> [  S_l  ] --> ...              --> logits --'
                                             ^ tensors, as the files will hold them

Glossary:

    teacher        the source model; its residual streams pass each layer once, for any number of students
    student        the converted model, run from what its files will hold before they are complete
    walk           the way of one student past all layers, next to its teacher
    step           one layer of a walk, open on both sides; it is converted, or left as the source has it
    hidden states  residual streams ``[b, T, E]`` of a few sequences each, in memory or in a file (`hidden`)
    calibration    the sequences that fits and refinement learn from
    held-out       the sequences that they never see, on which errors and drift are measured

A run with one student::

    walk = Walk(Teacher(source, held_out, calibration), student)
    for step in walk:
        tensors = transform(step.index, step.statistics)   # may compare step.attention_error(candidate)
        step.convert(tensors)
    walk.measurement()

Several students learn from one teacher, which runs each of its layers once for all of them::

    walks = [Walk(teacher, student) for student in students]
    for layer in teacher.layers():
        for walk in walks:
            with walk.step(layer) as step:
                step.convert(transform(...))

In memory are one layer of each model, and the hidden states unless they are in a file. The student takes the
calibration sequences along only when a fit or refinement needs them.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.drift import compare
from kvfold.attention.drift.recording import LayerOutput, OpenLayer
from kvfold.convert.checkpoint.shards import OutputTensor
from kvfold.convert.checkpoint.tensors import torch_dtype
from kvfold.convert.errors import KvfoldError
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.hidden import Hidden, Keep
from kvfold.convert.walk.passes import advance, check_finite, chunk_size, embed, gather, through
from kvfold.convert.walk.statistics import ReadHeads

# GQA-2 of the model that ships: 256 +0.0410 nats per token, 1024 and 2048 +0.0360 (bench_refine_constants.py)
_JUDGED_TOKENS = 2048


class Student:
    """The converted model as a stream of layers, before its checkpoint is complete.

    It always runs from what the files will hold. A candidate for a layer is encoded into the tensors of the converted
    checkpoint, rounded to the dtype in which they will be stored, and read back through the same weight map and the
    same stock module that will load the finished files::

        transform -> layout.encode -> Student.put -> read(name), rounded -> WeightMap -> stock module -> error, loss

    So an error, a drift or a loss of the walk is one of the written checkpoint, and refinement trains what is stored.

    ``config`` and ``tensors`` are the converted checkpoint's. Copied tensors come from the source, the others are the
    last ones ``put``, all rounded to the stored ``dtypes``. Copied tensors are shared with the source's open layer,
    unless ``recast`` says that the checkpoint will store them in another dtype than the source.
    """

    def __init__(
        self, source: CheckpointStream, config: dict[str, Any], tensors: Iterable[OutputTensor], recast: bool = False
    ) -> None:
        self._planned = {tensor.name: tensor for tensor in tensors}
        self._read_source = source.read
        self._put: Mapping[str, Tensor] = {}
        self.dtypes = {name: torch_dtype(tensor.dtype) for name, tensor in self._planned.items()}
        # The open layer of the source lends the student what both store alike.
        origins = {name: tensor.sources for name, tensor in self._planned.items() if tensor.sources}
        changed = self._planned.keys() if recast else self._planned.keys() - origins.keys()
        self.stream = type(source)(
            config,
            self._read,
            list(self._planned),
            source.device,
            source.dtype,
            teacher=source,
            changed=changed,
            origins=origins,
        )

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Use a layer's ``tensors``, named and shaped as in the converted checkpoint's files, instead of the last ones.

        Raises KvfoldError for names that the conversion does not compute.
        """
        unplanned = sorted(name for name in tensors if name not in self._planned or not self._planned[name].computed)
        if unplanned:
            raise KvfoldError(f"the converted checkpoint computes no tensors {', '.join(unplanned)}")
        self._put = dict(tensors)

    def _read(self, name: str) -> Tensor:
        """The tensor that the converted checkpoint will hold under ``name``."""
        planned = self._planned[name]
        if planned.computed:
            if name not in self._put:
                raise KvfoldError(f"tensor {name!r} was read before its layer was converted")
            tensor = self._put[name]
        elif isinstance(planned.source, str):
            tensor = self._read_source(planned.source)
        else:
            # Elements of several source tensors that follow one another; a plan without sources stands for zeros.
            parts = [self._read_source(part).flatten() for part in planned.sources]
            tensor = torch.cat(parts).view(planned.shape) if parts else torch.zeros(planned.shape)
        return tensor.to(self.dtypes[name])


@dataclass
class Step:
    """One layer of a walk, with the teacher's layer open.

    ``statistics`` are of the calibration sequences, None in a walk without them. ``held_out`` and ``student_held_out``
    are the residual streams before the layer on the held-out sequences, the teacher's and the student's;
    ``calibration`` and ``student_calibration`` likewise, empty unless the walk keeps them. ``outputs`` are those of the
    teacher's layer on ``held_out``. ``done``: both streams are past the layer. ``drift`` is None unless converted.
    """

    index: int
    teacher: OpenLayer
    student: Student
    held_out: Hidden
    student_held_out: Hidden
    outputs: Iterable[LayerOutput]
    statistics: LayerStatistics | None = None
    calibration: Hidden = field(default_factory=list)
    student_calibration: Hidden = field(default_factory=list)
    done: bool = field(init=False, default=False)
    drift: compare.LayerDrift | None = field(init=False, default=None)

    @torch.no_grad()
    def attention_error(self, tensors: Mapping[str, Tensor]) -> float:
        """``||y - y'||^2 / ||y||^2`` of the attention's output on held-out sequences if ``tensors`` were used.

        Measured on the first sequences of about 2048 tokens: candidates differ alike on all of them.
        """
        self.student.put(tensors)
        error = norm = 0.0
        left = max(1, _JUDGED_TOKENS // self.held_out[0].shape[1])
        with self.student.stream.open_layer(self.index) as layer:
            for hidden, output in zip(self.held_out, self.outputs, strict=True):
                expected = output.attention[:left]
                error += energy(layer.attend(hidden[:left]).attention - expected)
                norm += energy(expected)
                left -= len(expected)
                if left == 0:
                    break
        return error / norm if norm else error

    @torch.no_grad()
    def convert(self, tensors: Mapping[str, Tensor]) -> compare.LayerDrift:
        """Use ``tensors``: compare the student's layer with the teacher's and take both streams past it."""
        self.student.put(tensors)
        with self.student.stream.open_layer(self.index) as layer:
            # The teacher's layer has been run already: its outputs come again, in the same order.
            replayed, streams = iter(self.outputs), (self.held_out, self.student_held_out)
            self.drift = compare.compare_layer(
                self.index, lambda _: next(replayed), layer, *streams, self.student.stream
            )
            self._finish(layer)
        return self.drift

    @torch.no_grad()
    def follow(self, tensors: Mapping[str, Tensor]) -> float:
        """Use ``tensors`` as `convert` does, but run the student alone: returns the distance of its residual stream.

        ``||h - h'|| / ||h||`` after the layer, `LayerDrift.residual_propagated`; nothing else is compared.
        """
        self.student.put(tensors)
        expected = [output.states for output in self.outputs]
        with self.student.stream.open_layer(self.index) as layer:
            for chunk, hidden in enumerate(self.student_held_out):
                self.student_held_out[chunk] = layer(hidden).states
            self._finish(layer)
        wrong = sum(float(compare.squares(a - b)) for a, b in zip(expected, self.student_held_out, strict=True))
        return compare.relative(wrong, sum(float(compare.squares(each)) for each in expected))

    @torch.no_grad()
    def skip(self) -> None:
        """Leave the student's layer as the source has it, and take both streams past it."""
        for chunk, output in enumerate(self.outputs):
            # Until the first converted layer both streams are the same, and half of the work is saved.
            same = torch.equal(self.held_out[chunk], self.student_held_out[chunk])
            student = output if same else self.teacher(self.student_held_out[chunk])
            self.held_out[chunk], self.student_held_out[chunk] = output.states, student.states
        self._finish(self.teacher)

    def _finish(self, layer: OpenLayer) -> None:
        """Take the student's calibration sequences past ``layer``, and drop what only this layer needs."""
        # After the last layer nothing is fitted to them any more.
        if self.index + 1 < self.student.stream.layers:
            for chunk, hidden in enumerate(self.student_calibration):
                self.student_calibration[chunk] = layer(hidden).states
        self.outputs = ()
        self.done = True


@dataclass(frozen=True)
class _RememberingLayer(OpenLayer):
    """An open layer that keeps its attention's output for each input tensor that it was run on."""

    # By the identity of the input, which is kept alive with it.
    memory: dict[int, tuple[Tensor, LayerOutput]] = field(default_factory=dict)

    def __call__(self, hidden: Tensor) -> LayerOutput:
        output = super().__call__(hidden)
        self.memory[id(hidden)] = hidden, LayerOutput(None, output.attention, output.attention.new_empty(0))
        return output

    def attend(self, hidden: Tensor) -> LayerOutput:
        return self.memory[id(hidden)][1] if id(hidden) in self.memory else super().attend(hidden)


@dataclass
class TeacherLayer:
    """One layer of the teacher, open, for its students to compare theirs with.

    ``held_out`` and ``calibration`` are its inputs, ``outputs`` its results on ``held_out``. ``calibration`` is empty
    unless the teacher keeps it, ``statistics`` None unless it gathers them.
    """

    index: int
    layer: OpenLayer
    held_out: Hidden
    outputs: Iterable[LayerOutput]
    calibration: Hidden
    statistics: LayerStatistics | None


class Teacher:
    """The source's side of a walk: its residual streams, taken through each layer once for any number of students.

    ``held_out [M, T]`` and ``calibration [N, T]`` are tokens; without ``calibration`` only the held-out sequences go
    through. ``profile`` adds distance profiles to the statistics; without ``statistics`` there are none; ``heads`` as
    in `survey`. ``keep_calibration`` keeps what refinement needs, at four times the memory for hidden states.
    ``remember`` keeps the attention's outputs until the layer is left, for several students that compare with them, at
    the memory of one more residual stream of all sequences. ``keep`` stores hidden states, in memory (``list``) or in
    a file (``Spill``); with ``remember`` they must be in memory.
    """

    def __init__(
        self,
        source: CheckpointStream,
        held_out: Tensor,
        calibration: Tensor | None = None,
        *,
        profile: bool = False,
        statistics: bool = True,
        keep_calibration: bool = False,
        heads: ReadHeads | None = None,
        remember: bool = False,
        keep: Keep = list,
    ) -> None:
        self.stream, self.tokens, self.keep = source, held_out, keep
        self.kept = calibration if keep_calibration else None
        self._profile, self._statistics, self._heads, self._remember = profile, statistics, heads, remember
        self.held_out = embed(source, held_out, keep)
        self._calibration = keep([]) if calibration is None else embed(source, calibration, keep)

    def layers(self) -> Iterator[TeacherLayer]:
        """Every layer in order. Raises InputError when its outputs are not finite."""
        for index in range(self.stream.layers):
            with self.stream.open_layer(index) as layer:
                if self._remember:
                    # Several students compare their attention with the teacher's on the same inputs.
                    layer = _RememberingLayer(layer.index, layer.module, layer.arguments, layer.tensors)
                calibration, statistics = self._calibration[: 0 if self.kept is None else None], None
                if self._calibration and self._statistics:
                    statistics, _ = gather(self.stream, layer, self._calibration, self._profile, self._heads)
                elif self._calibration:
                    advance(self.stream, layer, self._calibration)
                held_out = self.held_out
                self.held_out, outputs = through(layer, held_out)
                check_finite(self.held_out, self.stream, index)
                opened = TeacherLayer(index, layer, held_out, outputs, calibration, statistics)
                yield opened
                # The caller still holds the layer while the next one runs.
                opened.outputs, opened.calibration, outputs, calibration = (), [], (), []
                if isinstance(layer, _RememberingLayer):
                    layer.memory.clear()


class Walk:
    """A student's way past all layers: iterating yields each, to be converted or skipped before the next.

    ``calibration`` says whether the student takes along the calibration sequences, where the teacher keeps them; its
    hidden states are stored as the teacher's are. Walks that share a teacher are not iterated: each takes the teacher's
    layers by `step`.
    """

    def __init__(self, teacher: Teacher, student: Student, *, calibration: bool = True) -> None:
        self._teacher, self._student = teacher, student
        self._student_held_out = embed(student.stream, teacher.tokens, teacher.keep)
        kept = teacher.kept if calibration else None
        self._student_calibration = teacher.keep([]) if kept is None else embed(student.stream, kept, teacher.keep)
        self.drifts: list[compare.LayerDrift] = []
        self._passed = 0

    def __iter__(self) -> Iterator[Step]:
        for layer in self._teacher.layers():
            with self.step(layer) as step:
                yield step

    @contextmanager
    def step(self, layer: TeacherLayer) -> Iterator[Step]:
        """The student at ``layer``; it must be converted or skipped in the block."""
        step = Step(
            layer.index,
            layer.layer,
            self._student,
            layer.held_out[:],
            self._student_held_out,
            layer.outputs,
            layer.statistics,
            layer.calibration,
            self._student_calibration,
        )
        yield step
        if not step.done:
            raise KvfoldError(f"the walk went on from layer {layer.index} before it was converted")
        # The caller still holds the step while the next layer runs.
        step.calibration = []
        self._passed += 1
        self.drifts += [] if step.drift is None else [step.drift]

    @torch.no_grad()
    def measurement(self) -> compare.Measurement:
        """The whole student against the teacher on the held-out sequences, after the last layer."""
        source, student = self._teacher.stream, self._student.stream
        if self._passed < source.layers:
            raise KvfoldError(f"the walk has done {self._passed} of {source.layers} layers")
        tokens = torch.split(self._teacher.tokens, chunk_size(source.device, self._teacher.tokens.shape[1]))
        measured = compare.compare_predictions(source, student, self._teacher.held_out, self._student_held_out, tokens)
        check_finite([torch.tensor(measured.teacher_loss)], source, None)
        source.release()
        student.release()
        return replace(measured, layers=tuple(self.drifts))


def energy(tensor: Tensor) -> float:
    """Sum of squares, in float64."""
    return float(tensor.double().square().sum())
