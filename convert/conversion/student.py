"""The student of a conversion: its walk beside the source, the refinement of its layers, and what was measured of it.

The student is always run from what the output's files will hold: transformed weights are encoded to the files' tensors
and rounded to their dtypes before a layer of the student is built from them. So a candidate is judged, a layer refined
and the drift measured on exactly what a reader of the checkpoint will load.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvfold.attention.drift.compare import Measurement, compare_predictions
from kvfold.attention.drift.report import DriftReport, report_of
from kvfold.convert import processes
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.calibration import hidden_states, own_sequences
from kvfold.convert.conversion.journal import Journal
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.source import source_heads
from kvfold.convert.errors import KvfoldError
from kvfold.convert.methods.registry import Notes
from kvfold.convert.progress import Stages
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.windows import CalibrationTokens
from kvfold.convert.training.refine import AUTO_STEPS, MIN_GAIN, ROUND, Refinement, refine_layer
from kvfold.convert.walk.hidden import Keep
from kvfold.convert.walk.output_fit import AttentionUpdate, refit_output
from kvfold.convert.walk.passes import chunk_size, last_states
from kvfold.convert.walk.walk import Step, Student, Teacher, TeacherLayer, Walk

_AGREE = 1e-3  # relative; what is written was rounded in memory too, so only the order of sums differs


@dataclass(frozen=True)
class Converted:
    """A converted layer: its tensors, named and shaped as in the output's files, and notes for ``kvfold.json``."""

    index: int
    tensors: Mapping[str, Tensor]
    notes: Notes


@dataclass(frozen=True)
class Calibrated:
    """The measurements of a calibrated run. ``stream`` is the source's, ``spill`` the folder for hidden states."""

    tokens: CalibrationTokens
    drift: DriftReport
    choices: Notes
    stream: CheckpointStream
    spill: str | None = None

    def record(self, folder: Path) -> dict[str, Any]:
        """For ``kvfold.json``: nothing that differs between equal runs.

        Raises KvfoldError when the loss of the checkpoint in ``folder`` is not the one that was measured in memory.
        """
        expected, written = self.drift.measured.student_loss, written_loss(folder, self)
        if not math.isclose(written, expected, rel_tol=_AGREE, abs_tol=_AGREE):
            raise KvfoldError(
                f"the written checkpoint has a loss of {written:.6f} nats, the converted model in memory had "
                f"{expected:.6f} on the same text: nothing was kept; please report it"
            )
        losses = {"loss_in_memory": expected, "loss_of_written_checkpoint": written}
        tokens = self.tokens
        return {
            "calibration": {
                "source": tokens.source,
                "sha256": tokens.digest,
                "sequences": len(tokens.calibration),
                "held_out": len(tokens.held_out),
                "tokens_each": tokens.calibration.shape[1],
            },
            **self.choices,
            "drift": self.drift.to_dict() | {"written": losses},
        }


@torch.no_grad()
def written_loss(folder: Path, measured: Calibrated) -> float:
    """Mean negative log-likelihood of the checkpoint in ``folder`` on the held-out sequences, nats per token."""
    tokens = measured.tokens.held_out
    with written_stream(folder, measured.stream) as stream, hidden_states(measured.spill) as keep:
        parts = torch.split(tokens, chunk_size(stream.device, tokens.shape[1]))
        states = last_states(stream, tokens, keep)
        return compare_predictions(stream, stream, states, states, parts).teacher_loss


@contextmanager
def written_stream(folder: Path, like: CheckpointStream) -> Iterator[CheckpointStream]:
    """The checkpoint in ``folder`` as a stream like the source's."""
    checkpoint = open_checkpoint(folder)
    try:
        yield CheckpointStream(checkpoint.config, checkpoint.read, list(checkpoint.tensors), like.device, like.dtype)
    finally:
        checkpoint.close()


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

        def encode(changed: Any) -> Mapping[str, Tensor]:
            return self._plan.layout.encode(step.index, changed)

        notes: dict[str, Any] = {}
        if self._refits:
            weights, fit = refit_output(step, weights, encode, attention_update(self._plan))
            notes = {} if fit is None else {"output_fit": fit.record()}
        tensors, refined = self._refine(step, encode(weights))
        return tensors, {**notes, **refined}

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


class Refiner:
    """Refines the layers of a run whose request says so; passes the others through.

    ``steps`` replaces the request's, for a short trial, which prints nothing; with 0 nothing is refined.
    """

    def __init__(self, plan: Plan, steps: int | None = None) -> None:
        requested = plan.request.refine
        made = requested if steps is None else steps
        self._task = refinement(plan, made) if requested and made else None
        self._layers, self._quiet = plan.geometry.layers, plan.request.quiet or steps is not None
        self._stages = Stages(quiet=self._quiet)
        if requested == "auto" and not self._quiet:
            print(
                f"refining: each layer until its error falls by less than {100 * MIN_GAIN:g} % in {ROUND} steps, "
                f"{AUTO_STEPS} at most",
                file=sys.stderr,
            )

    @property
    def enabled(self) -> bool:
        """True if layers are refined: the walk must keep its calibration sequences then."""
        return self._task is not None

    def __call__(self, step: Step, tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """The ``tensors`` of a layer, refined or as they are, and its notes."""
        if self._task is None:
            return tensors, {}
        done, total = 0, AUTO_STEPS if self._task.steps == "auto" else int(self._task.steps)
        with self._stages("refining", total, "step") as advance:

            def progress(steps: int, error: float) -> None:
                nonlocal done
                advance(steps - done)
                done = steps

            refined = refine_layer(step, tensors, self._task, progress)
        if not self._quiet:
            outcome = f"unchanged after {refined.steps} steps"
            if refined.kept:
                outcome = f"step {refined.kept} of {refined.steps}"
            errors = f"error {refined.before:.5f} -> {refined.after:.5f}"
            tqdm.write(f"refined layer {step.index + 1}/{self._layers}: {errors} ({outcome})", file=sys.stderr)
        return refined.tensors, {"refinement": refined.record()}


def refinement(plan: Plan, steps: int | str) -> Refinement:
    """The task for ``plan``: the norms and scales around its attention, and the constants that must not move."""
    update = attention_update(plan)
    if plan.request.to != "mla" or plan.layout.code is not None:
        return Refinement(steps, plan.request.seed, update, update)
    # DeepSeek's layers add their attention as it is: scales and norms of the source are in its weights.
    return Refinement(steps, plan.request.seed, update, constant=plan.latent_target().constant)


def attention_update(plan: Plan) -> AttentionUpdate:
    """The attention update of ``plan``'s layers: the family's residual scale and norm of the attention's output."""
    norms = plan.model.names.get(("attention_post_norm", 0))
    norm = None if norms is None else norms[0].split(".0.", 1)[1].removesuffix(".weight")
    return AttentionUpdate(plan.model.block.residual_scale, norm)
