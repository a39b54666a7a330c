"""Polish a converted checkpoint: train all its attention layers together on the source model's
predictions.
"""

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from torch import Tensor

from kvfold.convert.checkpoint.atomic import sync_path
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.writer import ShardWriter
from kvfold.convert.conversion.calibration import Calibration
from kvfold.convert.conversion.journal import POLISH_STATE
from kvfold.convert.conversion.layers import build_student
from kvfold.convert.conversion.memory import needs_checkpointing
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.progress import ProgressStages
from kvfold.convert.training.budget import POLISH_ROUND, count_polish_steps, count_step_tokens
from kvfold.convert.training.loop import train
from kvfold.convert.training.polish import PolishTask, TrainingText, compute_teacher_states
from kvfold.convert.training.steps import check_constant_channel, has_constant_channel


def polish_checkpoint(
    plan: Plan, calibration: Calibration, folder: Path, stages: ProgressStages
) -> dict[str, Any]:
    """Train all attention layers of the checkpoint in ``folder`` together, in place. Returns the
    entry about this training for ``kvfold.json``.
    """
    request = plan.request
    source = calibration.source
    tokens = calibration.tokens
    steps = count_polish_steps(request.polish, request.calibration_length)
    with closing(open_checkpoint(folder)) as written, ExitStack() as stack:
        held_out = compute_teacher_states(source, tokens.held_out, stages)
        constant = has_constant_channel(written)
        student = build_student(plan, calibration)
        tensors = {
            name: written.read_tensor(name)
            for names in plan.output.computed_names
            for name in names
        }
        student.set_layer_tensors(tensors)
        stored = needs_checkpointing(plan)
        task = PolishTask(
            student,
            [
                stack.enter_context(student.stream.open_layer(index, stored))
                for index in range(plan.geometry.layers)
            ],
            tensors,
            TrainingText(source, tokens.training_sequences, stages),
            held_out,
            steps,
            constant=constant,
        )
        del tensors  # the task has them in float32
        batches = task.text.draw_batches(steps, request.seed)
        with stages("polish", steps, "step") as advance:
            done = 0
            for result in train(task, batches, POLISH_ROUND, folder / POLISH_STATE):
                advance(result.steps - done)
                done = result.steps
                # A resumed run has the figures of the round that it starts from.
                if len(result.curve) < len(result.errors):
                    tokens_seen = done * count_step_tokens(request.calibration_length)
                    result.curve.append({"tokens": tokens_seen, **task.figures})
                    if not request.quiet:
                        kl = f"KL {task.figures['kl']:.5f} nats per held-out token"
                        print(f"polished {done}/{steps} steps: {kl}", file=sys.stderr)
        if constant:
            check_constant_channel(result.tensors, written)
    if result.tensors:
        _replace_tensors(plan, folder, result.tensors)
    return {
        **result.summarize(),
        "sequences": len(tokens.training_sequences),
        "curve": result.curve,
    }


def _replace_tensors(plan: Plan, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the trained ``tensors`` in the weight files in ``folder``."""
    # A run that is interrupted from here on writes them again from this state.
    sync_path(folder / POLISH_STATE)
    sync_path(folder)
    # Every tensor counts as written: the trained ones are replaced in the files that are there.
    writer = ShardWriter(folder, plan.shards, [tensor.name for tensor in plan.output.tensors])
    writer.write(tensors)
    writer.sync()
