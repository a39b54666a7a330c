"""Polishing in a conversion: the written layers trained together, written again, and measured."""

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from kvfold.attention.drift.compare import compare
from kvfold.attention.drift.report import report_of
from kvfold.convert.checkpoint.opening import Checkpoint, open_checkpoint
from kvfold.convert.checkpoint.tensors import torch_dtype
from kvfold.convert.checkpoint.writer import ShardWriter
from kvfold.convert.conversion.journal import POLISH_STATE
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.student import Calibrated, written_stream
from kvfold.convert.device import training_autocast
from kvfold.convert.progress import Stages
from kvfold.convert.training.budget import steps_of
from kvfold.convert.training.fit import FitResult
from kvfold.convert.training.polish import ModelTrainee, Text
from kvfold.convert.training.polish import polish as train
from kvfold.convert.training.steps import check_constant, has_constant
from kvfold.convert.walk.passes import chunk_size, last_states


def polish(plan: Plan, calibrated: Calibrated, folder: Path, stages: Stages) -> Calibrated:
    """Train all converted attention of the checkpoint in ``folder`` together; its files then hold the result.

    ``calibrated`` has the text and the source; returned are the same with the drift of the result. A resumed run goes
    on from the last round of the one that was killed.
    """
    source, tokens = calibrated.stream, calibrated.tokens
    with closing(open_checkpoint(folder)) as written:
        polished = _train(plan, written, calibrated, folder / POLISH_STATE, stages)
        if has_constant(written):
            check_constant(polished.tensors, written)
    if polished.kept:
        # Every tensor counts as written: the trained ones are replaced in the files that are there.
        writer = ShardWriter(folder, plan.shards, [tensor.name for tensor in plan.tensors])
        writer.write_own(polished.tensors)
        writer.sync()
    record = {
        "before": polished.errors[0],
        "after": min(polished.errors),
        "steps": polished.steps,
        "kept": polished.kept,
        "sequences": len(tokens.training),
    }
    with stages("measuring"), written_stream(folder, source) as student:
        measured = compare(source, student, tokens.held_out, chunk_size(source.device, tokens.held_out.shape[1]))
        drift = report_of(measured, source, student, tokens.held_out)
    return replace(calibrated, drift=drift, choices={**calibrated.choices, "polish": record})


def _train(plan: Plan, written: Checkpoint, calibrated: Calibrated, saved: Path, stages: Stages) -> FitResult:
    source, request = calibrated.stream, plan.request
    autocast = training_autocast(written, source.device)

    @torch.no_grad()
    def text(tokens: Tensor) -> Text:
        """``tokens`` with the source's residual streams after its last layer, in the precision of training."""
        with torch.autocast(source.device.type, autocast, enabled=autocast is not None):
            states = last_states(source, tokens)
        return Text(tokens, torch.cat([hidden.to(autocast or hidden.dtype) for hidden in states]))

    with stages("running the source over the text to polish on"):
        training, held_out = text(calibrated.tokens.training), text(calibrated.tokens.held_out)
    dtypes = {tensor.name: torch_dtype(tensor.dtype) for tensor in plan.layout.tensors}
    trained = {name: dtypes[name] for names in plan.layout.computed for name in names}
    constant = has_constant(written)
    trainee = ModelTrainee(written.config, written.read, dtypes, trained, source.device, autocast, constant=constant)
    steps, done = steps_of(request.polish), 0
    with stages("polish", steps, "step") as advance:

        def progress(step: int, error: float) -> None:
            nonlocal done
            advance(step - done)
            done = step
            if not request.quiet:
                line = f"polished {step}/{steps} steps: KL {error:.5f} nats on held-out tokens"
                tqdm.write(line, file=sys.stderr)

        saved_at = saved if request.resume else None
        return train(trainee, training, held_out, steps, seed=request.seed, saved=saved_at, progress=progress)
