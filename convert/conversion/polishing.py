"""Polish a converted checkpoint: train all its attention layers together to predict what the source
predicts.
"""

import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvfold.attention.drift.compare import compare
from kvfold.attention.drift.report import DriftReport, make_report
from kvfold.convert import processes
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.tensors import torch_dtype
from kvfold.convert.checkpoint.writer import ShardWriter
from kvfold.convert.conversion.calibration import Calibration
from kvfold.convert.conversion.journal import POLISH_STATE, mark_polished
from kvfold.convert.conversion.measurement import open_stream
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.formatting import format_bytes
from kvfold.convert.progress import Advance, Stages
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.training.budget import POLISH_ROUND, intervals, step_tokens, steps_of
from kvfold.convert.training.fit import FitResult
from kvfold.convert.training.polish import ModelTrainee, Text, TrainingText, polish
from kvfold.convert.training.steps import check_constant, has_constant
from kvfold.convert.walk.walk import chunk_size, last_states


def polish_checkpoint(
    plan: Plan, calibration: Calibration, folder: Path, stages: Stages
) -> tuple[DriftReport, dict[str, Any]] | None:
    """Train the checkpoint in ``folder`` in place.

    Returns the new drift, and an entry for ``kvfold.json``, on the first process; every process
    must call this.
    """
    request = plan.request
    source = calibration.source
    tokens = calibration.tokens
    steps = steps_of(request.polish, request.length)
    with closing(open_checkpoint(folder)) as written:
        constant = has_constant(written)
        trainee = ModelTrainee(
            written.config,
            written.read,
            {tensor.name: torch_dtype(tensor.dtype) for tensor in plan.layout.tensors},
            [name for names in plan.layout.computed for name in names],
            source.device,
            source.autocast,
            constant=constant,
        )
        with stages("running the teacher over held-out text"):
            held_out = taught_text(source, tokens.held_out, None)
        training = TrainingText(
            tokens.training,
            lambda indices: (
                taught_text(source, tokens.training[indices].long(), source.autocast).states
            ),
        )
        with stages("polish", steps, "step") as advance:
            fitted = polish(
                trainee,
                training,
                held_out,
                steps,
                seed=request.seed,
                saved=_state_file(trainee, folder),
                progress=_Progress(plan, trainee, held_out, advance),
            )
        if constant:
            check_constant(fitted.tensors, written)
    return processes.on_rank0(lambda: _replace_tensors(plan, calibration, folder, fitted, stages))


def _state_file(trainee: ModelTrainee, folder: Path) -> Path | None:
    """The file for the state from which an interrupted run resumes; None, with a line that says so,
    without room.
    """
    path = folder / POLISH_STATE
    # Masters, two moments and the best weights; a new version is whole before the old one is
    # removed.
    needed = 2 * sum(16 * tensor.numel() for tensor in trainee.learning.values())
    free = shutil.disk_usage(folder).free
    if free < needed and not path.is_file():
        print(
            f"too little disk space to keep the state of polishing ({format_bytes(needed)} needed,"
            f" {format_bytes(free)} free): it cannot resume",
            file=sys.stderr,
        )
        return None
    return path


@torch.no_grad()
def taught_text(teacher: CheckpointStream, tokens: Tensor, autocast: torch.dtype | None) -> Text:
    """``tokens`` with the teacher's residual streams after its last layer, whose products are of
    dtype ``autocast``.
    """
    with torch.autocast(teacher.device.type, autocast, enabled=autocast is not None):
        states = last_states(teacher, tokens)
    return Text(tokens, torch.cat([hidden.to(autocast or hidden.dtype) for hidden in states]))


class _Progress:
    """Called after every round: prints the KL and, at intervals, measures the weights in full."""

    def __init__(self, plan: Plan, trainee: ModelTrainee, held_out: Text, advance: Advance) -> None:
        length = plan.request.length
        self._quiet = plan.request.quiet
        self._measured_steps = intervals(steps_of(plan.request.polish, length), length)
        self._step_tokens = step_tokens(length)
        self._trainee = trainee
        self._held_out = held_out
        self._advance = advance
        self._steps = 0

    def __call__(self, fitted: FitResult) -> None:
        self._advance(fitted.steps - self._steps)
        self._steps = fitted.steps
        if not processes.is_rank0():
            return
        tokens = fitted.steps * self._step_tokens
        text = f"KL {fitted.errors[-1]:.5f} nats on held-out tokens"
        # A resumed run has measured the round that it starts from.
        measured = bool(fitted.curve) and fitted.curve[-1]["tokens"] >= tokens
        if fitted.steps in self._measured_steps and not measured:
            figures = self._trainee.figures(self._held_out)
            fitted.curve.append({"tokens": tokens, **figures})
            text += (
                f", excess {figures['excess']:+.5f} nats, top-1 agreement"
                f" {figures['top_1_agreement']:.1%}"
            )
        if not self._quiet:
            total = max(self._measured_steps)
            tqdm.write(
                f"polished {fitted.steps}/{total} steps, {tokens} tokens: {text}", file=sys.stderr
            )


def _replace_tensors(
    plan: Plan, calibration: Calibration, folder: Path, fitted: FitResult, stages: Stages
) -> tuple[DriftReport, dict[str, Any]]:
    """Replace the trained tensors in the files in ``folder``; returns their drift and the record."""
    source = calibration.source
    tokens = calibration.tokens
    if fitted.tensors:
        mark_polished(folder)
        # Every tensor counts as written: the trained ones are replaced in the files that are there.
        writer = ShardWriter(folder, plan.shards, [tensor.name for tensor in plan.layout.tensors])
        writer.write_own(fitted.tensors)
        writer.sync()
    record = {
        "before": fitted.errors[0],
        "after": min(fitted.errors),
        "steps": fitted.steps,
        "kept": fitted.kept,
        "sequences": len(tokens.training),
        "errors": fitted.errors,
        "tokens_per_error": POLISH_ROUND * step_tokens(plan.request.length),
        "curve": fitted.curve,
    }
    with stages("measuring"), open_stream(folder, source) as student:
        batch = chunk_size(source.device, tokens.held_out.shape[1])
        measured = compare(source, student, tokens.held_out, batch)
        drift = make_report(measured, source, student, tokens.held_out)
    return drift, record
