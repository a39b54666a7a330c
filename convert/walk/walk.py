"""The walk: text goes through a model layer by layer, and through its converted student beside it.

One ``Step`` is one layer of both; the ``Twin`` is the student (``twin.py``)::

                          layer 0          Step: layer l                    after the last layer
    teacher    embed --> [  T_0  ] ... h --> [  T_l  ] --> ...              --> logits --.
                                             |  ^ statistics of its inputs               +--> measurement
                                    transform|  v drift                                  |
    student    embed --> [  S_0  ] ... h' -> [  S_l  ] --> ...              --> logits --'
                                             ^ tensors, as the files will hold them

A run reads as ::

    walk = Walk(Teacher(source, held_out, calibration), twin)
    for step in walk:
        tensors = transform(step.index, step.statistics)   # may compare step.attention_error(candidate)
        step.convert(tensors)
    walk.measurement()

Several students learn side by side from one ``Teacher``, which goes through its layers once for all of them::

    teacher = Teacher(source, held_out, calibration)
    walks = [Walk(teacher, twin) for twin in twins]
    for lesson in teacher.lessons():
        for walk in walks:
            with walk.step(lesson) as step:
                step.convert(transform(...))

In memory are one layer of each and the hidden states, unless these are in a file (``hidden.py``). The teacher takes the
calibration and the held-out sequences through its layers, the student the held-out ones, and the calibration sequences
too when refinement needs them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvfold.attention.drift.heads import squares
from kvfold.attention.drift.lockstep import LayerDrift, Measurement, compare_layer, compare_predictions, relative
from kvfold.attention.drift.recording import OpenLayer
from kvfold.attention.drift.streams import LayerOutput
from kvfold.convert.errors import KvfoldError
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.finite import check_finite
from kvfold.convert.walk.heads import ReadHeads
from kvfold.convert.walk.hidden import Hidden, Keep
from kvfold.convert.walk.passes import advance, chunk_size, embed, gather, through
from kvfold.convert.walk.remembered import Remembered
from kvfold.convert.walk.twin import Twin

# GQA-2 of the model that ships: 256 +0.0410 nats per token, 1024 and 2048 +0.0360 (bench_refine_constants.py)
_JUDGED_TOKENS = 2048


@dataclass
class Step:
    """One layer of a walk, the teacher's open.

    ``statistics`` are those of the calibration sequences, None in a walk without them. ``held_out`` and
    ``student_held_out`` are the residual streams before the layer on the held-out sequences, the teacher's and the
    student's; ``calibration`` and ``student_calibration`` likewise, empty unless the walk keeps them for refinement.
    ``outputs`` are those of the teacher's layer on ``held_out``. ``done`` says that both streams are past the layer,
    ``drift`` is None unless it was converted.
    """

    index: int
    teacher: OpenLayer
    twin: Twin
    held_out: Hidden
    student_held_out: Hidden
    outputs: Sequence[LayerOutput]
    statistics: LayerStatistics | None = None
    calibration: Hidden = field(default_factory=list)
    student_calibration: Hidden = field(default_factory=list)
    done: bool = field(init=False, default=False)
    drift: LayerDrift | None = field(init=False, default=None)

    @torch.no_grad()
    def attention_error(self, tensors: Mapping[str, Tensor]) -> float:
        """``||y - y'||^2 / ||y||^2`` of the attention's output on held-out sequences if ``tensors`` were used.

        Measured on the first sequences of about 2048 tokens: candidates differ alike on all of them.
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
        """Use ``tensors``: compare the student's layer with the teacher's and take both streams past it."""
        self.twin.put(tensors)
        with self.twin.stream.open_layer(self.index) as layer:
            replayed, student = _Replayed(self.outputs), self.twin.stream
            self.drift = compare_layer(self.index, replayed, layer, self.held_out, self.student_held_out, student)
            self._take(layer, self._onward())
        self.outputs = ()
        self.done = True
        return self.drift

    @torch.no_grad()
    def follow(self, tensors: Mapping[str, Tensor]) -> float:
        """Use ``tensors`` as `convert` does, but run the student alone: returns the distance of its residual stream.

        ``||h - h'|| / ||h||`` after the layer, `LayerDrift.residual_propagated`; nothing else is compared.
        """
        self.twin.put(tensors)
        with self.twin.stream.open_layer(self.index) as layer:
            self._take(layer, self.student_held_out)
            self._take(layer, self._onward())
        expected = [output.states for output in self.outputs]
        wrong = sum(float(squares(a - b)) for a, b in zip(expected, self.student_held_out, strict=True))
        distance = relative(wrong, sum(float(squares(each)) for each in expected))
        self.outputs = ()
        self.done = True
        return distance

    @torch.no_grad()
    def keep(self) -> None:
        """Leave the layer to the student as the source has it, and take both streams past it."""
        for chunk, output in enumerate(self.outputs):
            same = torch.equal(self.held_out[chunk], self.student_held_out[chunk])
            student = output if same else self.teacher(self.student_held_out[chunk])
            self.held_out[chunk], self.student_held_out[chunk] = output.states, student.states
        self._take(self.teacher, self._onward())
        self.outputs = ()
        self.done = True

    def _onward(self) -> Hidden:
        """The student's calibration sequences, none after the last layer: no layer is fitted to them any more."""
        return self.student_calibration if self.index + 1 < self.twin.stream.layers else []

    def _take(self, layer: OpenLayer, states: Hidden) -> None:
        """Take ``states`` past ``layer``."""
        for chunk, hidden in enumerate(states):
            states[chunk] = layer(hidden).states


class _Replayed:
    """A layer that has been run already: returns its outputs again, in the same order."""

    def __init__(self, outputs: Sequence[LayerOutput]) -> None:
        self._outputs = iter(outputs)

    def __call__(self, hidden: Tensor) -> LayerOutput:
        return next(self._outputs)

    def attend(self, hidden: Tensor) -> LayerOutput:
        return replace(next(self._outputs), hidden=None)


@dataclass
class Lesson:
    """One layer of the teacher, open: what its students compare theirs with.

    ``held_out`` and ``calibration`` are its inputs, ``outputs`` those on ``held_out``. ``calibration`` is empty unless
    the teacher keeps it, ``statistics`` None unless it gathers them.
    """

    index: int
    layer: OpenLayer
    held_out: Hidden
    outputs: Sequence[LayerOutput]
    calibration: Hidden
    statistics: LayerStatistics | None


class Teacher:
    """The source's side of a walk: its residual streams, taken through each layer once for any number of students.

    ``held_out [M, T]`` and ``calibration [N, T]`` are tokens. ``profile`` adds distance profiles to the statistics;
    without ``statistics`` there are none; ``heads`` as in `survey`. ``keep_calibration`` keeps what refinement needs,
    at four times the memory for hidden states. Without ``calibration`` only the held-out sequences go through.
    ``remember`` keeps what its attention gave until the layer is left, for several students that compare with it, at
    the memory of one more residual stream of all sequences. ``keep`` says where hidden states are, in memory or in a
    file; with ``remember`` they must be in memory.
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

    def lessons(self) -> Iterator[Lesson]:
        """Every layer in order. Raises InputError when its outputs are not finite."""
        for index in range(self.stream.layers):
            with self.stream.open_layer(index) as opened:
                layer = Remembered.of(opened) if self._remember else opened
                calibration = self._calibration[: 0 if self.kept is None else None]
                statistics = self._gather(layer)
                held_out = self.held_out
                self.held_out, outputs = through(layer, held_out)
                check_finite(self.held_out, self.stream, index)
                lesson = Lesson(index, layer, held_out, outputs, calibration, statistics)
                yield lesson
                # The caller still holds the lesson while the next layer runs.
                lesson.outputs, lesson.calibration, outputs, calibration = (), [], (), []
                if isinstance(layer, Remembered):
                    layer.memory.clear()

    def _gather(self, layer: OpenLayer) -> LayerStatistics | None:
        if not self._calibration:
            return None
        if self._statistics:
            return gather(self.stream, layer, self._calibration, self._profile, self._heads)[0]
        advance(self.stream, layer, self._calibration)
        return None


class Walk:
    """A student's way beside its teacher: iterating yields every layer, to be converted or kept before the next.

    ``calibration`` says whether the student takes along the calibration sequences, where the teacher keeps them; its
    hidden states are where the teacher's are. Of several walks that share a teacher none is iterated: each takes the
    teacher's lessons by `step`.
    """

    def __init__(self, teacher: Teacher, twin: Twin, *, calibration: bool = True) -> None:
        self._teacher, self._twin = teacher, twin
        self._student_held_out = embed(twin.stream, teacher.tokens, teacher.keep)
        kept = teacher.kept if calibration else None
        self._student_calibration = teacher.keep([]) if kept is None else embed(twin.stream, kept, teacher.keep)
        self.drifts: list[LayerDrift] = []
        self._passed = 0

    def __iter__(self) -> Iterator[Step]:
        for lesson in self._teacher.lessons():
            with self.step(lesson) as step:
                yield step

    @contextmanager
    def step(self, lesson: Lesson) -> Iterator[Step]:
        """The student at the layer of ``lesson``; it must be converted or kept in the block."""
        step = Step(
            lesson.index,
            lesson.layer,
            self._twin,
            lesson.held_out[:],
            self._student_held_out,
            lesson.outputs,
            lesson.statistics,
            lesson.calibration,
            self._student_calibration,
        )
        yield step
        if not step.done:
            raise KvfoldError(f"the walk went on from layer {lesson.index} before it was converted")
        step.calibration = []  # which the caller still holds
        self._passed += 1
        self.drifts += [] if step.drift is None else [step.drift]

    @torch.no_grad()
    def measurement(self) -> Measurement:
        """The whole student against the teacher on the held-out sequences, after the last layer."""
        source, student = self._teacher.stream, self._twin.stream
        if self._passed < source.layers:
            raise KvfoldError(f"the walk has done {self._passed} of {source.layers} layers")
        tokens = torch.split(self._teacher.tokens, chunk_size(source.device, self._teacher.tokens.shape[1]))
        measured = compare_predictions(source, student, self._teacher.held_out, self._student_held_out, tokens)
        judged = measured.teacher_loss if measured.cosine is None else measured.cosine
        check_finite([torch.tensor(judged)], source, None)
        source.release()
        student.release()
        return replace(measured, layers=tuple(self.drifts))


def _energy(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())
