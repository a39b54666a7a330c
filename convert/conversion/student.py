"""The student of a conversion: its walk beside the source (`walk.Student`), refinement and
measurements.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvfold.attention.drift.compare import Measurement, compare_predictions
from kvfold.attention.drift.report import DriftReport, dtype_name, finite, report_of
from kvfold.convert import processes
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.calibration import hidden_states, source_heads
from kvfold.convert.conversion.fitted import LatentSpectrum
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.errors import InputError, KvfoldError
from kvfold.convert.methods.registry import Notes
from kvfold.convert.progress import Advance, Stages
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.text.windows import CalibrationTokens
from kvfold.convert.training.fit import AfterRound, FitResult
from kvfold.convert.training.refine import (
    MIN_GAIN,
    MOST_STEPS,
    REFINE_ROUND,
    Refinement,
    refine_layer,
)
from kvfold.convert.walk.hidden import Keep
from kvfold.convert.walk.output_fit import AttentionUpdate, refit_output
from kvfold.convert.walk.passes import chunk_size, last_states
from kvfold.convert.walk.walk import Step, Student, Teacher, Walk

SPECTRUM = "latent_spectrum"
ConvertedLayer = tuple[Mapping[str, Tensor], Notes]
# Nearly every weight takes part in the loss of every token, so that few tell whether all were
# written: chosen.
_CHECKED_TOKENS = 2048
# Relative. What is written was rounded in memory too, so only the order of sums differs: chosen far
# above that.
_AGREE = 1e-3


@dataclass(frozen=True)
class Calibrated:
    """The results of a calibrated run. ``stream`` reads the source; ``spill`` is the folder for
    hidden states.
    """

    tokens: CalibrationTokens
    drift: DriftReport
    choices: Notes
    stream: CheckpointStream
    spill: str | None = None

    @property
    def checked(self) -> Tensor:
        """The first held-out sequences, on which the written checkpoint must have the loss measured
        in memory.
        """
        return self.tokens.held_out[: max(1, _CHECKED_TOKENS // self.tokens.held_out.shape[1])]

    def with_positions(self, folder: Path) -> "Calibrated":
        """Return the results with the loss by position on long sequences, if there are any, of the
        files in ``folder``.

        Where activations exceed float32 only in long sequences, the stretches stay those of the
        shorter ones.
        """
        tokens = self.tokens.long
        if not len(tokens):
            return self
        try:
            stretches = self._compared(folder, tokens, self.stream).stretches
        except InputError as error:
            # Hours of work are not lost for a measurement beside it.
            print(
                f"the loss by position ends at {self.tokens.held_out.shape[1]} tokens: {error}",
                file=sys.stderr,
            )
            return self
        finally:
            self.stream.release()
        return replace(
            self,
            drift=replace(self.drift, measured=replace(self.drift.measured, stretches=stretches)),
        )

    @torch.no_grad()
    def _compared(
        self, folder: Path, tokens: Tensor, teacher: CheckpointStream | None = None
    ) -> Measurement:
        """Compare the checkpoint in ``folder`` on ``tokens`` with ``teacher``; with itself if only
        its loss matters.
        """
        with written_stream(folder, self.stream) as stream, hidden_states(self.spill) as keep:
            actual = last_states(stream, tokens, keep)
            expected = actual if teacher is None else last_states(teacher, tokens, keep)
            parts = torch.split(tokens, chunk_size(stream.device, tokens.shape[1]))
            return compare_predictions(teacher or stream, stream, expected, actual, parts)

    def record(self, folder: Path) -> dict[str, Any]:
        """The entries for ``kvfold.json``, identical for equal runs.

        Raises KvfoldError if the loss of the checkpoint in ``folder`` differs from the loss
        measured in memory.
        """
        tokens = self.tokens
        checked = self.checked
        expected = fmean(loss for _, _, loss in self.drift.measured.by_sequence[: len(checked)])
        written = self._compared(folder, checked).student_loss  # nats per token
        if not math.isclose(written, expected, rel_tol=_AGREE, abs_tol=_AGREE):
            raise KvfoldError(
                f"the written checkpoint has a loss of {written:.6f} nats, but the converted model"
                f" in memory had {expected:.6f} on the same text; the output was discarded, please"
                " report this"
            )
        precisions = (self.stream.training_dtype, self.stream.dtype)
        losses = {"loss_in_memory": expected, "loss_of_written_checkpoint": written}
        return {
            "calibration": {
                "source": tokens.source,
                "sha256": tokens.digest,
                "sequences": len(tokens.calibration),
                "held_out": len(tokens.held_out),
                "tokens_each": tokens.calibration.shape[1],
            },
            "precision": dict(
                zip(("training", "held_out"), map(dtype_name, precisions), strict=True)
            ),
            **self.choices,
            "drift": self.drift.to_dict() | {"written": losses, **self._by_text()},
        }

    def _by_text(self) -> dict[str, Any]:
        """The KL and the excess on the held-out sequences of each text of a mixture; empty for a
        single text.
        """
        of_texts: dict[str, list[tuple[float, ...]]] = {}
        for text, figures in zip(
            self.tokens.held_out_texts, self.drift.measured.by_sequence, strict=False
        ):
            of_texts.setdefault(text, []).append(figures)
        rows = [
            {"text": text, "sequences": len(figures)}
            | {
                name: finite(fmean(each[place] for each in figures))
                for place, name in enumerate(("kl", "excess"))
            }
            for text, figures in sorted(of_texts.items())
        ]
        return {"texts": rows} if rows else {}


@contextmanager
def written_stream(folder: Path, like: CheckpointStream) -> Iterator[CheckpointStream]:
    """Open the checkpoint in ``folder`` as a stream on the device of ``like``."""
    with closing(open_checkpoint(folder)) as checkpoint:
        yield CheckpointStream(
            checkpoint.config, checkpoint.read, list(checkpoint.tensors), like.device
        )


class StudentWalk(Walk):
    """Walk the source and, beside it, the student that the finished checkpoint would be.

    With ``statistics``, statistics and distance profiles of the calibration sequences are
    collected. ``trial_steps`` replaces the request's refinement steps in a short trial. Several
    students can share one ``teacher``; advance each with `step` then. ``keep`` stores hidden
    states. ``steps`` iterates over the remaining layers, each for `made`.
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
        request = plan.request
        refine = request.refine and (request.refine if trial_steps is None else trial_steps)
        self._plan = plan
        self._source = source
        self._tokens = tokens
        self._refits, self._refinement = request.chosen_method.reads_text, refinement(plan, refine)
        self._quiet = request.quiet or trial_steps is not None
        # The calibration sequences are kept for what is fitted to the student, and dropped
        # otherwise.
        trains = self._refits or bool(refine)
        teacher = teacher or Teacher(
            source,
            tokens.held_out,
            processes.shard(tokens.calibration) if statistics or trains else None,
            statistics=statistics,
            keep_calibration=trains,
            heads=source_heads(plan),
            # Fits take what the source's attention gave to the calibration sequences.
            remember=trains and keep is list,
            keep=keep,
        )
        recast = request.dtype != "auto"
        self._target = Student(source, plan.layout.config, plan.layout.tensors, recast=recast)
        super().__init__(teacher, self._target, calibration=trains)
        self.steps = iter(self)
        if refine == "auto" and not self._quiet:
            until = (
                f"until its error falls by less than {100 * MIN_GAIN:g} % in {REFINE_ROUND} steps"
            )
            print(f"refining: each layer {until}, at most {MOST_STEPS} steps", file=sys.stderr)

    def made(self, step: Step, weights: Any) -> ConvertedLayer:
        """Fit and refine a layer. Returns its tensors as the output's files name and shape them,
        and its notes.
        """
        encode = partial(self._plan.layout.encode, step.index)
        notes = dict[str, Any]()
        if self._refits:
            # The output projection is fitted to the student's stream, which has the errors of the
            # layers before.
            weights, fit = refit_output(step, weights, encode, self._refinement.update)
            notes = (
                {}
                if fit is None
                else {"output_fit": dict(zip(("before", "after"), fit, strict=True))}
            )
        tensors = encode(weights)
        steps = self._refinement.steps
        if not steps:
            return tensors, notes
        with Stages(quiet=self._quiet)(
            "refining", MOST_STEPS if steps == "auto" else int(steps), "step"
        ) as advance:
            refined = refine_layer(step, tensors, self._refinement, reporting(advance))
        if not self._quiet:
            outcome = f"unchanged after {refined.steps} steps"
            if refined.kept:
                outcome = f"step {refined.kept} of {refined.steps}"
            place = f"{step.index + 1}/{self._source.layers}"
            errors = f"{refined.before:.5f} -> {refined.after:.5f}"
            tqdm.write(
                f"refined layer {place}: relative squared error {errors} ({outcome})",
                file=sys.stderr,
            )
        record = {name: value for name, value in vars(refined).items() if name != "tensors"}
        return refined.tensors, {**notes, "refinement": record}

    def measured(self, notes: Sequence[Notes], choices: Notes) -> Calibrated:
        """Measure the drift after the last layer. ``notes`` (one per layer) and ``choices`` go to
        ``kvfold.json``.
        """
        # By name; a layer without a note of a name is left out of its list.
        names = dict.fromkeys(name for each in notes for name in each)
        made: dict[str, Any] = {
            name: [each[name] for each in notes if name in each] for name in names
        }
        if SPECTRUM in made and self._plan.latent is not None:
            # The mean spectrum, and what each layer loses.
            mean = torch.tensor(
                [each["sorted"] for each in made[SPECTRUM]], dtype=torch.float64
            ).mean(0)
            lost = [each["lost"] for each in made[SPECTRUM]]
            made[SPECTRUM] = vars(LatentSpectrum(self._plan.latent.channels, mean.tolist(), lost))
        drift = report_of(
            self.measurement(), self._source, self._target.stream, self._tokens.held_out
        )
        return Calibrated(
            self._tokens, drift, {**choices, **made}, self._source, self._plan.request.spill
        )


def refinement(plan: Plan, steps: int | str) -> Refinement:
    """The refinement task for ``plan``: the norms and scales around its attention, and any constant
    to keep fixed.
    """
    norms = plan.model.names.get(("attention_post_norm", 0))
    norm = None if norms is None else norms[0].split(".0.", 1)[1].removesuffix(".weight")
    update = AttentionUpdate(plan.model.block.residual_scale, norm)
    if plan.latent is None or plan.layout.code is not None:
        return Refinement(steps, plan.request.seed, update, update)
    # DeepSeek's layers add their attention as it is: scales and norms of the source are in its
    # weights.
    return Refinement(steps, plan.request.seed, update, constant=plan.latent.constant)


def reporting(advance: Advance) -> AfterRound:
    """Return a callback for training that advances the stage to the step of every round."""
    done = 0

    def progress(fitted: FitResult) -> None:
        nonlocal done
        advance(fitted.steps - done)
        done = fitted.steps

    return progress
