"""The walk of a conversion: the source, and beside it the student that a finished checkpoint would be.

The student is always run from what the output's files will hold: transformed weights are encoded to the files' tensors
and rounded to their dtypes before a layer of the student is built from them. So a candidate is judged, a layer refined
and the drift measured on exactly what a reader of the checkpoint will load.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvfold.attention.drift.compare import Measurement
from kvfold.attention.drift.report import report_of
from kvfold.convert import processes
from kvfold.convert.conversion.calibrated import Calibrated
from kvfold.convert.conversion.calibration import own_sequences
from kvfold.convert.conversion.journal import Journal
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.refinement import OUTPUT_FIT, Refiner, attention_update
from kvfold.convert.conversion.source import source_heads
from kvfold.convert.methods.registry import Notes
from kvfold.convert.progress import Stages
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.windows import CalibrationTokens
from kvfold.convert.walk.hidden import Keep
from kvfold.convert.walk.output_fit import refit_output
from kvfold.convert.walk.walk import Step, Student, Teacher, TeacherLayer, Walk


@dataclass(frozen=True)
class Converted:
    """A converted layer: its tensors, named and shaped as in the output's files, and notes for ``kvfold.json``."""

    index: int
    tensors: Mapping[str, Tensor]
    notes: Notes


class StudentWalk:
    """The walk of a conversion: the source and, beside it, the student that a finished checkpoint would be.

    ``statistics`` has the walk gather the statistics of the calibration sequences, with distance profiles;
    ``trial_steps`` replaces the request's steps of refinement, for a short trial: None leaves them, 0 refines nothing.
    ``teacher`` is one that several students share: each goes on by `step` then. ``keep`` says where hidden states are.
    """

    def __init__(
        self,
        plan: Plan,
        source: CheckpointStream,
        tokens: CalibrationTokens,
        *,
        statistics: bool,
        trial_steps: int | None = None,
        teacher: Teacher | None = None,
        keep: Keep = list,
    ) -> None:
        self._plan, self._source, self._tokens = plan, source, tokens
        self._refine = Refiner(plan, trial_steps)
        self._refits = plan.request.chosen_method.reads_text
        trains = self._refits or self._refine.enabled
        self._student = Student(source, plan.layout.config, plan.layout.tensors, recast=plan.request.dtype != "auto")
        teacher = teacher or Teacher(
            source,
            tokens.held_out,
            own_sequences(tokens.calibration) if statistics or trains else None,
            profile=statistics,
            statistics=statistics,
            keep_calibration=trains,
            heads=source_heads(plan),
            keep=keep,
        )
        self._walk = Walk(teacher, self._student, calibration=trains)
        self._steps = iter(self._walk)

    def walk_again(self, journal: Journal, stages: Stages) -> None:
        """Go past the layers that ``journal`` has finished, with the tensors that were written."""
        done = len(journal.notes)
        for step in stages.over("again", itertools.islice(self._steps, done), done, "layer") if done else ():
            finished = journal.finished(step.index)
            assert finished is not None  # the finished layers are the first ones
            step.convert(finished)

    def steps(self) -> Iterator[Step]:
        """The layers that are left to convert, each to be passed to ``convert``."""
        return self._steps

    def convert(self, step: Step, weights: Any, notes: Notes | None = None) -> Converted:
        """Encode transformed ``weights`` as the target stores them and take the walk past the layer.

        Those of ``principal`` get the output projection that fits the student; they are refined where the request says
        so.
        """
        tensors, made = self._made(step, weights)
        step.convert(tensors)
        return Converted(step.index, tensors, {**(notes or {}), **made})

    def follow(self, step: Step, weights: Any) -> float:
        """As ``convert``, but without the drift of the layer, except that of the residual stream, which it returns."""
        return step.follow(self._made(step, weights)[0])

    def _made(self, step: Step, weights: Any) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """The layer's tensors as they will be stored, and notes on how they came about."""
        weights, fitted = self._refit_output(step, weights)
        tensors, refined = self._refine(step, self._plan.layout.encode(step.index, weights))
        return tensors, {**fitted, **refined}

    def _refit_output(self, step: Step, weights: Any) -> tuple[Any, dict[str, Any]]:
        if not self._refits:
            return weights, {}

        def encode(changed: Any) -> Mapping[str, Tensor]:
            return self._plan.layout.encode(step.index, changed)

        refitted, fit = refit_output(step, weights, encode, attention_update(self._plan))
        return refitted, {} if fit is None else {OUTPUT_FIT: fit.record()}

    def step(self, lesson: TeacherLayer) -> AbstractContextManager[Step]:
        """A layer beside that of a shared teacher; to be passed to ``convert`` in the block."""
        return self._walk.step(lesson)

    @property
    def stream(self) -> CheckpointStream:
        """The student."""
        return self._student.stream

    def measurement(self) -> Measurement:
        """The student against the source on held-out tokens, after the last layer."""
        return self._walk.measurement()

    def kl(self) -> float:
        """KL of the next-token distributions on held-out tokens after the last layer, nats."""
        return processes.from_first(lambda: self.measurement().kl)

    def measured(self, choices: Notes) -> Calibrated:
        """The drift after the last layer. ``choices`` are further entries of ``kvfold.json``."""
        drift = report_of(self.measurement(), self._source, self.stream, self._tokens.held_out)
        return Calibrated(self._tokens, drift, choices, self._source, self._plan.request.spill)
