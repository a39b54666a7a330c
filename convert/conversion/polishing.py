"""Polish a converted checkpoint: train all its attention layers together to predict what the source
predicts.
"""

import shutil
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvfold.attention.drift.compare import compare
from kvfold.attention.drift.report import DriftReport, make_report
from kvfold.convert import processes
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.writer import ShardWriter
from kvfold.convert.conversion.calibration import Calibration
from kvfold.convert.conversion.journal import POLISH_STATE, mark_polished
from kvfold.convert.conversion.layers import open_student
from kvfold.convert.conversion.measurement import open_stream
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.formatting import format_bytes
from kvfold.convert.progress import Stages
from kvfold.convert.training.budget import step_tokens, steps_of
from kvfold.convert.training.loop import TrainingResult
from kvfold.convert.training.polish import ModelTask, TrainingText, polish, run_teacher
from kvfold.convert.training.steps import check_constant, has_constant
from kvfold.convert.walk.walk import chunk_size


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
    with closing(open_checkpoint(folder)) as written, ExitStack() as stack:
        with stages("running the teacher over held-out text"):
            held_out = run_teacher(source, tokens.held_out)
        constant = has_constant(written)
        student = open_student(plan, calibration)
        tensors = {name: written.read(name) for names in plan.output.computed for name in names}
        student.put(tensors)
        task = ModelTask(
            student,
            [
                stack.enter_context(student.stream.open_layer(index))
                for index in range(plan.geometry.layers)
            ],
            tensors,
            TrainingText(source, tokens.training),
            held_out,
            steps,
            constant=constant,
        )
        with stages("polish", steps, "step") as advance:
            done = 0
            for result in polish(task, request.seed, _state_file(task, folder)):
                advance(result.steps - done)
                done = result.steps
                if processes.is_rank0():
                    _report_round(plan, task, result)
        if constant:
            check_constant(result.tensors, written)
    return processes.on_rank0(lambda: _replace_tensors(plan, calibration, folder, result, stages))


def _state_file(task: ModelTask, folder: Path) -> Path | None:
    """The file for the state from which an interrupted run resumes; None, with a line that says so,
    without room.
    """
    path = folder / POLISH_STATE
    # Masters, two moments and the best weights; a new version is whole before the old one is
    # removed.
    needed = 2 * sum(16 * tensor.numel() for tensor in task.trained.values())
    free = shutil.disk_usage(folder).free
    if free < needed and not path.is_file():
        print(
            f"too little disk space to keep the state of polishing ({format_bytes(needed)} needed,"
            f" {format_bytes(free)} free): it cannot resume",
            file=sys.stderr,
        )
        return None
    return path


def _report_round(plan: Plan, task: ModelTask, result: TrainingResult) -> None:
    """Add the held-out figures after a round to the curve of ``result``, and print them."""
    tokens = result.steps * step_tokens(plan.request.length)
    # A resumed run has those of the round that it starts from.
    if len(result.curve) < len(result.errors):
        result.curve.append({"tokens": tokens, **task.figures})
    figures = result.curve[-1]
    if not plan.request.quiet:
        tqdm.write(
            f"polished {result.steps}/{task.steps} steps, {tokens} tokens:"
            f" KL {figures['kl']:.5f} nats on held-out tokens, excess {figures['excess']:+.5f}"
            f" nats, top-1 agreement {figures['top_1_agreement']:.1%}",
            file=sys.stderr,
        )


def _replace_tensors(
    plan: Plan, calibration: Calibration, folder: Path, result: TrainingResult, stages: Stages
) -> tuple[DriftReport, dict[str, Any]]:
    """Replace the trained tensors in the files in ``folder``; return the drift and the record."""
    source = calibration.source
    tokens = calibration.tokens
    if result.tensors:
        mark_polished(folder)
        # Every tensor counts as written: the trained ones are replaced in the files that are there.
        writer = ShardWriter(folder, plan.shards, [tensor.name for tensor in plan.output.tensors])
        writer.write(result.tensors)
        writer.sync()
    record = {
        "before": result.errors[0],
        "after": min(result.errors),
        "steps": result.steps,
        "kept": result.best_step,
        "sequences": len(tokens.training),
        "curve": result.curve,
    }
    with stages("measuring"), open_stream(folder, source) as student:
        batch = chunk_size(source.device, tokens.held_out.shape[1])
        measured = compare(source, student, tokens.held_out, batch)
        drift = make_report(measured, source, student, tokens.held_out)
    return drift, record
