"""Polishing a converted checkpoint: the teacher, the progress that is told, and the checkpoints
that are written.
"""

import shutil
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from kvfold.attention.drift.compare import compare
from kvfold.attention.drift.report import report_of
from kvfold.convert import processes
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.tensors import torch_dtype
from kvfold.convert.checkpoint.writer import ShardWriter
from kvfold.convert.conversion.journal import POLISH_STATE, mark_polished
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.student import Calibrated, reporting, written_stream
from kvfold.convert.progress import Advance, Stages
from kvfold.convert.sizes import bytes_text
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.training.budget import POLISH_ROUND, intervals, step_tokens, steps_of
from kvfold.convert.training.fit import AfterRound, FitResult
from kvfold.convert.training.polish import ModelTrainee, Text, TrainingText, polish
from kvfold.convert.training.steps import check_constant, has_constant
from kvfold.convert.walk.passes import chunk_size, last_states


def polish_checkpoint(
    plan: Plan, calibrated: Calibrated, folder: Path, stages: Stages
) -> Calibrated:
    """Train the checkpoint in ``folder`` in place. Returns ``calibrated`` with the new drift, on
    the first process.

    Every process must call this.
    """
    request = plan.request
    source = calibrated.stream
    tokens = calibrated.tokens
    steps = steps_of(request.polish, request.length)
    with closing(open_checkpoint(folder)) as written:
        constant = has_constant(written)
        autocast = source.autocast
        stored = {tensor.name: torch_dtype(tensor.dtype) for tensor in plan.layout.tensors}
        attention = [name for names in plan.layout.computed for name in names]
        trainee = ModelTrainee(
            written.config,
            written.read,
            stored,
            attention,
            source.device,
            autocast,
            constant=constant,
        )
        with stages("running the teacher over held-out text"):
            held_out = taught_text(source, tokens.held_out, None)
        text = tokens.training
        training = TrainingText(
            text, lambda indices: taught_text(source, text[indices].long(), autocast).states
        )

        with stages("polish", steps, "step") as advance:
            progress = _progress(plan, trainee, held_out, advance)
            saved = _state_file(trainee, folder)
            fitted = polish(
                trainee,
                training,
                held_out,
                steps,
                seed=request.seed,
                saved=saved,
                progress=progress,
            )
        if constant:
            check_constant(fitted.tensors, written)

    def replaced() -> Calibrated:
        if fitted.tensors:
            mark_polished(folder)
        return _rewritten(plan, calibrated, folder, fitted.tensors, fitted, stages)

    return processes.on_rank0(replaced) or calibrated


def _state_file(trainee: ModelTrainee, folder: Path) -> Path | None:
    """The file for the state from which an interrupted run resumes; None, with a line that says so,
    without room.
    """
    path = folder / POLISH_STATE
    # Masters, two moments and the best weights; a new version is whole before the old one is
    # removed.
    needed = 2 * sum(16 * each.numel() for each in trainee.learning.values())
    free = shutil.disk_usage(folder).free
    if free < needed and not path.is_file():
        figures = f"{bytes_text(needed)} needed, {bytes_text(free)} free"
        print(
            f"too little disk space to keep the state of polishing ({figures}): it cannot resume",
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


def _progress(
    plan: Plan,
    trainee: ModelTrainee,
    held_out: Text,
    advance: Advance,
) -> AfterRound:
    """Return the callback of every round, which prints the KL and, at intervals, measures the
    weights.
    """
    request = plan.request
    measured_steps = intervals(steps_of(request.polish, request.length), request.length)
    shown = reporting(advance)
    last = max(measured_steps)

    def progress(fitted: FitResult) -> None:
        shown(fitted)
        if not processes.is_rank0():
            return
        tokens = fitted.steps * step_tokens(request.length)
        line = ""
        # A resumed run has measured the round that it starts from.
        measured = bool(fitted.curve) and fitted.curve[-1]["tokens"] >= tokens
        if fitted.steps in measured_steps and not measured:
            found = trainee.figures(held_out)
            fitted.curve.append({"tokens": tokens, **found})
            line = (
                f", excess {found['excess']:+.5f} nats, top-1 agreement"
                f" {found['top_1_agreement']:.1%}"
            )
        if not request.quiet:
            done = f"polished {fitted.steps}/{last} steps, {tokens} tokens"
            tqdm.write(
                f"{done}: KL {fitted.errors[-1]:.5f} nats on held-out tokens{line}", file=sys.stderr
            )

    return progress


def _rewritten(
    plan: Plan,
    calibrated: Calibrated,
    folder: Path,
    tensors: Mapping[str, Tensor],
    fitted: FitResult,
    stages: Stages,
) -> Calibrated:
    """Replace ``tensors`` in the files in ``folder``; returns ``calibrated`` with their drift and
    the record.
    """
    request = plan.request
    source = calibrated.stream
    tokens = calibrated.tokens
    if tensors:
        # Every tensor counts as written: the trained ones are replaced in the files that are there.
        writer = ShardWriter(folder, plan.shards, [tensor.name for tensor in plan.layout.tensors])
        writer.write_own(tensors)
        writer.sync()
    record = {
        "before": fitted.errors[0],
        "after": min(fitted.errors),
        "steps": fitted.steps,
        "kept": fitted.kept,
        "sequences": len(tokens.training),
        "errors": fitted.errors,
        "tokens_per_error": POLISH_ROUND * step_tokens(request.length),
        "curve": fitted.curve,
    }
    with stages("measuring"), written_stream(folder, source) as student:
        measured = compare(
            source, student, tokens.held_out, chunk_size(source.device, tokens.held_out.shape[1])
        )
        drift = report_of(measured, source, student, tokens.held_out)
    return replace(calibrated, drift=drift, choices={**calibrated.choices, "polish": record})
