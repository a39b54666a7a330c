"""Runs text through a model and its converted student side by side, layer by layer.

::

                          layer 0          Step: layer l                    after the last layer
    teacher    embed --> [  T_0  ] ... h --> [  T_l  ] --> ...              --> logits --.
                                             |  ^ statistics of its inputs               +--> measurement
                                    transform|  v drift                                  |
    student    embed --> [  S_0  ] ... h' -> [  S_l  ] --> ...              --> logits --'
                                             ^ tensors, as stored in the files

Glossary:

    teacher        the source model; it runs each layer once, for any number of students student
    the converted model, run from the tensors that its files will contain, before they are complete
    walk           one pass of a student through all layers, alongside its teacher step
    one layer of a walk, open in both models; it is converted, or left as in the source hidden
    states  residual streams ``[b, T, E]`` of a few sequences each, in memory or in a file
    (`hidden`) calibration    the sequences on which fits and refinement are trained held-out
    sequences never used for training, on which errors and drift are measured

A run with one student::

    walk = Walk(Teacher(source, held_out, calibration), student)
    for step in walk:
        tensors = transform(step.index, step.statistics)   # may compare
        step.attention_error(candidate) step.convert(tensors)
    walk.measurement()

Several students can share one teacher, which runs each of its layers once for all of them::

    walks = [Walk(teacher, student) for student in students]
    for layer in teacher.layers():
        for walk in walks:
            with walk.step(layer) as step:
                step.convert(transform(...))

Memory holds one layer of each model, and the hidden states unless they are stored in a file. The
student runs the calibration sequences only if a fit or refinement needs them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.hidden import Hidden, Keep
from kvfold.convert.walk.passes import advance, check_finite, chunk_size, embed, gather, through
from kvfold.convert.walk.statistics import ReadHeads

# GQA-2 of the model that ships: 256 +0.0322 nats per token, 2048 +0.0284
# (bench_refine_constants.py, 2026-11-24)
_JUDGED_TOKENS = 2048


class Student:
    """The converted model as a stream of layers, available before its checkpoint is complete.

    It always runs from the tensors in its files. A candidate for a layer is encoded into the
    tensors of the converted checkpoint, rounded to the dtype in which they will be stored, and read
    back through the same weight map and the same stock module that will load the finished files::

        transform -> layout.encode -> Student.put -> read(name), rounded -> WeightMap -> stock
        module -> error, loss

    So every error, drift and loss in a walk is that of the written checkpoint, and refinement
    trains the stored weights.

    ``config`` and ``tensors`` describe the converted checkpoint. Copied tensors are read from the
    source, computed tensors are the last ones passed to ``put``; all are rounded to the stored
    ``dtypes``. Copied tensors share memory with the source's open layer, unless ``recast`` says
    that the checkpoint will store another dtype.
    """

    def __init__(
        self,
        source: CheckpointStream,
        config: dict[str, Any],
        tensors: Iterable[OutputTensor],
        recast: bool = False,
    ) -> None:
        self._planned = {tensor.name: tensor for tensor in tensors}
        self._read_source = source.read
        self._put: Mapping[str, Tensor] = {}
        self.dtypes = {name: torch_dtype(tensor.dtype) for name, tensor in self._planned.items()}
        # The student shares the tensors of the source's open layer that both checkpoints store
        # identically.
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
            autocast=source.autocast,
        )

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the current computed tensors by ``tensors`` of one layer, named and shaped as in
        the converted files.

        Raises KvfoldError for names that the conversion does not compute.
        """
        computed = {name for name, planned in self._planned.items() if planned.source is None}
        unplanned = sorted(set(tensors) - computed)
        if unplanned:
            raise KvfoldError(f"the conversion computes no tensors named {', '.join(unplanned)}")
        self._put = dict(tensors)

    def _read(self, name: str) -> Tensor:
        """The tensor that the converted checkpoint will contain under ``name``."""
        planned = self._planned[name]
        if planned.source is None:
            if name not in self._put:
                raise KvfoldError(f"tensor {name!r} was read before its layer was converted")
            tensor = self._put[name]
        elif isinstance(planned.source, str):
            tensor = self._read_source(planned.source)
        else:
            # Concatenate the elements of several source tensors; a tensor without sources is all
            # zeros.
            parts = [self._read_source(part).flatten() for part in planned.sources]
            tensor = torch.cat(parts).view(planned.shape) if parts else torch.zeros(planned.shape)
        return tensor.to(self.dtypes[name])


@dataclass
class Step:
    """One layer of a walk, while the teacher's layer is open.

    ``statistics`` come from the calibration sequences, and ``inputs [n, E]`` are their first
    attention inputs; None in a walk without statistics. ``held_out`` and ``student_held_out`` are
    the teacher's and the student's residual streams before the layer on the held-out sequences;
    ``calibration`` and ``student_calibration`` are the same for the calibration sequences, empty
    unless the walk keeps them. ``outputs`` are the outputs of the teacher's layer for ``held_out``.
    ``done``: both streams have passed the layer. ``drift`` is None unless converted. ``contexts``
    are the heads' results of the candidate on ``student_calibration``, ``[b, T, H, Dv]`` in chunks,
    as long as only its output projection changes; empty if they are not known.
    """

    index: int
    teacher: OpenLayer
    student: Student
    held_out: Hidden
    student_held_out: Hidden
    outputs: Iterable[LayerOutput]
    statistics: LayerStatistics | None = None
    inputs: Tensor | None = None
    calibration: Hidden = field(default_factory=list)
    student_calibration: Hidden = field(default_factory=list)
    done: bool = field(init=False, default=False)
    drift: compare.LayerDrift | None = field(init=False, default=None)
    contexts: list[Tensor] = field(init=False, default_factory=list)

    @torch.no_grad()
    def attention_error(self, tensors: Mapping[str, Tensor]) -> float:
        """Return ``||y - y'||^2 / ||y||^2`` of the attention output on held-out sequences with
        candidate ``tensors``.

        Only the first 2048 or so tokens are used: candidates rank the same on more text.
        """
        self.student.put(tensors)
        sums = torch.zeros(2, dtype=torch.float64, device=self.student.stream.device)
        left = max(1, _JUDGED_TOKENS // self.held_out[0].shape[1])
        with self.student.stream.open_layer(self.index) as layer:
            for hidden, output in zip(self.held_out, self.outputs, strict=True):
                expected = output.attention[:left]
                wrong = layer.attend(hidden[:left]).attention - expected
                sums += torch.stack([compare.squares(wrong), compare.squares(expected)]).to(
                    sums.device
                )
                left -= len(expected)
                if left == 0:
                    break
        error, norm = sums.tolist()
        return float(error / norm if norm else error)

    @torch.no_grad()
    def convert(self, tensors: Mapping[str, Tensor]) -> compare.LayerDrift:
        """Use ``tensors`` for the layer, return its drift from the teacher's layer, and advance
        both streams.
        """
        self.student.put(tensors)
        with self.student.stream.open_layer(self.index) as layer:
            # The teacher's layer has already run: replay its outputs in the same order.
            replayed = iter(self.outputs)
            streams = (self.held_out, self.student_held_out)
            self.drift = compare.compare_layer(
                self.index, lambda _: next(replayed), layer, *streams, self.student.stream
            )
            self._finish(layer)
        return self.drift

    @torch.no_grad()
    def follow(self, tensors: Mapping[str, Tensor]) -> float:
        """Use ``tensors`` as in `convert`, but run only the student; return the error of its
        residual stream.

        This is ``||h - h'|| / ||h||`` after the layer (`LayerDrift.residual_propagated`); nothing
        else is compared.
        """
        self.student.put(tensors)
        expected = [output.states for output in self.outputs]
        with self.student.stream.open_layer(self.index) as layer:
            for chunk, hidden in enumerate(self.student_held_out):
                self.student_held_out[chunk] = layer(hidden).states
            self._finish(layer)
        wrong = sum(
            compare.squares(a - b) for a, b in zip(expected, self.student_held_out, strict=True)
        )
        return compare.relative(float(wrong), float(sum(map(compare.squares, expected))))

    @torch.no_grad()
    def skip(self) -> None:
        """Leave the student's layer as in the source, and run both streams through it."""
        for chunk, output in enumerate(self.outputs):
            # Before the first converted layer both streams are identical, so the student reuses the
            # teacher's outputs.
            same = torch.equal(self.held_out[chunk], self.student_held_out[chunk])
            student = output if same else self.teacher(self.student_held_out[chunk])
            self.held_out[chunk], self.student_held_out[chunk] = output.states, student.states
        self.contexts.clear()
        self._finish(self.teacher)

    def _finish(self, layer: OpenLayer) -> None:
        """Run the student's calibration sequences through ``layer``, and free everything that only
        this layer needs.
        """
        # Nothing is fitted after the last layer.
        if self.index + 1 < self.student.stream.layers:
            contexts: Sequence[Tensor | None] = self.contexts or [None] * len(
                self.student_calibration
            )
            with self.student.stream.training():
                for chunk, (hidden, context) in enumerate(
                    zip(self.student_calibration, contexts, strict=True)
                ):
                    self.student_calibration[chunk] = layer.run(hidden, context=context).states
        self.contexts.clear()
        self.outputs = ()
        self.done = True


@dataclass(frozen=True)
class _RememberingLayer(OpenLayer):
    """An open layer that stores its attention output for each input tensor on which it was run."""

    # Keyed by the id of the input, which is stored too so that it stays alive.
    memory: dict[int, tuple[Tensor, LayerOutput]] = field(default_factory=dict)

    def __call__(self, hidden: Tensor) -> LayerOutput:
        output = super().__call__(hidden)
        self.memory[id(hidden)] = (
            hidden,
            LayerOutput(None, output.attention, output.attention.new_empty(0)),
        )
        return output

    def attend(self, hidden: Tensor) -> LayerOutput:
        return self.memory[id(hidden)][1] if id(hidden) in self.memory else super().attend(hidden)


@dataclass
class TeacherLayer:
    """An open layer of the teacher, to which students compare theirs.

    ``held_out`` and ``calibration`` are its inputs, ``outputs`` its results for ``held_out``.
    ``calibration`` is empty unless the teacher keeps it; ``statistics`` and ``inputs`` (see `Step`)
    are None unless the teacher computes them.
    """

    index: int
    layer: OpenLayer
    held_out: Hidden
    outputs: Iterable[LayerOutput]
    calibration: Hidden
    statistics: LayerStatistics | None
    inputs: Tensor | None


class Teacher:
    """The source model in a walk: runs its residual streams through each layer once, for any number
    of students.

    ``held_out [M, T]`` and ``calibration [N, T]`` are token ids; without ``calibration`` only the
    held-out sequences are run. ``statistics=False`` turns statistics off; ``heads`` as in `gather`.
    ``keep_calibration`` keeps the hidden states that refinement needs; hidden states then take four
    times the memory. ``remember`` keeps the attention outputs until the next layer, for several
    students that compare with them; this takes as much memory as one more residual stream of all
    sequences. ``keep`` stores hidden states in memory (``list``) or in a file (``Spill``);
    ``remember`` requires them in memory.
    """

    def __init__(
        self,
        source: CheckpointStream,
        held_out: Tensor,
        calibration: Tensor | None = None,
        *,
        statistics: bool = True,
        keep_calibration: bool = False,
        heads: ReadHeads | None = None,
        remember: bool = False,
        keep: Keep = list,
    ) -> None:
        self.stream = source
        self.tokens = held_out
        self.keep = keep
        self._finished = 0  # layers at the beginning whose statistics nobody needs
        self.kept = calibration if keep_calibration else None
        self._statistics = statistics
        self._heads = heads
        self._remember = remember
        self.held_out = embed(source, held_out, keep)
        self._calibration = keep([]) if calibration is None else embed(source, calibration, keep)

    def skip_fits(self, layers: int) -> None:
        """See `Walk.skip_fits`."""
        self._finished = layers
        if layers == self.stream.layers:
            self._calibration = self.keep([])

    def layers(self) -> Iterator[TeacherLayer]:
        """Yield every layer in order. Raises InputError if its outputs are not finite."""
        for index in range(self.stream.layers):
            with self.stream.open_layer(index) as layer:
                if self._remember:
                    # Several students compare their attention with the teacher's for the same
                    # inputs.
                    layer = _RememberingLayer(**vars(layer))
                calibration = self._calibration[: 0 if self.kept is None else None]
                statistics = None
                inputs = None
                if self._calibration and self._statistics and index >= self._finished:
                    statistics, inputs = gather(self.stream, layer, self._calibration, self._heads)
                elif self._calibration:
                    with self.stream.training():
                        advance(self.stream, layer, self._calibration)
                held_out = self.held_out
                self.held_out, outputs = through(layer, held_out)
                check_finite(self.held_out, self.stream, index)
                opened = TeacherLayer(
                    index, layer, held_out, outputs, calibration, statistics, inputs
                )
                yield opened
                # The caller still references the layer while the next one runs.
                opened.outputs = ()
                opened.calibration = []
                outputs = ()
                calibration = []
                if isinstance(layer, _RememberingLayer):
                    layer.memory.clear()


class Walk:
    """One student's pass through all layers: iterating yields each layer's `Step`, to be converted
    or skipped.

    ``calibration``: True if the student also runs the calibration sequences that the teacher keeps;
    the student's hidden states are stored the same way as the teacher's. Do not iterate over walks
    that share a teacher: pass each of the teacher's layers to the `step` method of every walk
    instead.
    """

    def __init__(self, teacher: Teacher, student: Student, *, calibration: bool = True) -> None:
        self._teacher = teacher
        self._student = student
        self._student_held_out = embed(student.stream, teacher.tokens, teacher.keep)
        kept = teacher.kept if calibration else None
        self._student_calibration = (
            teacher.keep([]) if kept is None else embed(student.stream, kept, teacher.keep)
        )
        self.drifts: list[compare.LayerDrift] = []
        self._passed = 0

    def __iter__(self) -> Iterator[Step]:
        for layer in self._teacher.layers():
            with self.step(layer) as step:
                yield step

    def skip_fits(self, layers: int) -> None:
        """Pass the first ``layers`` layers, which are to be converted with known tensors, without
        statistics.

        If these are all layers, the calibration sequences are not run either.
        """
        self._teacher.skip_fits(layers)
        if layers == self._teacher.stream.layers:
            self._student_calibration = self._teacher.keep([])

    @contextmanager
    def step(self, layer: TeacherLayer) -> Iterator[Step]:
        """Yield the student's step for ``layer``; it must be converted or skipped inside the
        ``with`` block.
        """
        step = Step(
            layer.index,
            layer.layer,
            self._student,
            layer.held_out[:],
            self._student_held_out,
            layer.outputs,
            layer.statistics,
            layer.inputs,
            layer.calibration,
            self._student_calibration,
        )
        yield step
        if not step.done:
            raise KvfoldError(
                f"layer {layer.index} was not converted or skipped; call convert, follow or skip"
            )
        # The caller still references the step while the next layer runs.
        step.calibration = []
        self._passed += 1
        self.drifts += [] if step.drift is None else [step.drift]

    @torch.no_grad()
    def measurement(self) -> compare.Measurement:
        """Compare the whole student with the teacher on the held-out sequences, after the last
        layer.
        """
        source = self._teacher.stream
        student = self._student.stream
        if self._passed < source.layers:
            raise KvfoldError(
                f"the walk has passed only {self._passed} of {source.layers} layers; pass all of"
                " them"
            )
        tokens = torch.split(
            self._teacher.tokens, chunk_size(source.device, self._teacher.tokens.shape[1])
        )
        measured = compare.compare_predictions(
            source, student, self._teacher.held_out, self._student_held_out, tokens
        )
        check_finite([torch.tensor(measured.teacher_loss)], source, None)
        source.release()
        student.release()
        return replace(measured, layers=tuple(self.drifts))
