"""Estimate the time of a calibrated conversion, by a trial of its first layer on a few tokens."""

import sys
import time
from dataclasses import replace
from itertools import pairwise

from kvfold.convert import processes
from kvfold.convert.conversion.calibration import Calibration
from kvfold.convert.conversion.layers import convert_layer, open_walk
from kvfold.convert.conversion.plan import Plan, list_mla_specs
from kvfold.convert.conversion.splits import (
    FINALISTS,
    SURVEYED,
    TRIAL_CALIBRATION,
    TRIAL_HELD_OUT,
    TRIAL_LAYERS,
    choose_slots_of_all_layers,
)
from kvfold.convert.formatting import format_duration, format_labeled_rows
from kvfold.convert.progress import ProgressStages
from kvfold.convert.training.budget import (
    POLISH_ROUND,
    choose_refine_batch_size,
    count_polish_steps,
    count_step_tokens,
)
from kvfold.convert.training.refine import MOST_STEPS, REFINE_ROUND
from kvfold.convert.walk.walk import embed_tokens

_TRIAL_TOKENS = 2048  # chosen, not tuned
# Costs relative to a forward pass: of a training step, and of the attention in a layer. The drift
# is computed from two models' logits, in about a third of their time. Chosen, not tuned.
_STEP = 3.0
_ATTENTION = 0.5
_LOGITS = 2.7


def time_first_layer_and_announce_stages(
    plan: Plan, calibration: Calibration, finished: int, stages: ProgressStages
) -> None:
    """Convert layer 0 as a trial on a few tokens, whose result is discarded, and print the stages
    of the run with the time that each will take by this trial; ``stages`` gets the times too.

    The ``finished`` layers of an interrupted run take no time. Does nothing if the run is quiet,
    has a progress callback or several processes.
    """
    if plan.request.quiet or stages.progress or processes.world_size() > 1:
        return
    with stages("trying the first layer"):
        stages.estimates |= estimate_stages(plan, calibration, finished)
    times = [f"{name} {format_duration(time)}" for name, time in stages.estimates.items() if time]
    total = format_duration(sum(stages.estimates.values()))
    line = f"{', '.join(times)}: about {total} in all, by a trial of the first layer"
    print(format_labeled_rows([("stages", line)]), file=sys.stderr)


def estimate_stages(plan: Plan, calibration: Calibration, finished: int) -> dict[str, float]:
    """Return about how many seconds each stage of the run takes, by name; converts layer 0 on a
    few tokens to measure it.
    """
    request = plan.request
    source = calibration.source
    tokens = calibration.tokens
    length = request.calibration_length
    trial_tokens = tokens.calibration[: max(1, _TRIAL_TOKENS // length)]
    trial = (
        plan
        if plan.latent is None
        else plan.with_rotary_slots(choose_slots_of_all_layers(plan, []))
    )
    tokens_of_trial = replace(tokens, calibration=trial_tokens, held_out=trial_tokens)
    walk = open_walk(trial, replace(calibration, tokens=tokens_of_trial), 1, 0)
    hidden = embed_tokens(source, trial_tokens[:1, :8])
    with source.open_layer(0) as layer:
        layer(hidden[0])  # what the libraries load at their first call counts for no layer
    times = [time.monotonic()]
    step = next(iter(walk))
    times.append(time.monotonic())
    tensors, _ = convert_layer(trial, step, 0)
    times.append(time.monotonic())
    step.advance_student(tensors)
    times.append(time.monotonic())
    source.compute_logits(step.held_out[0][:1])
    times.append(time.monotonic())
    run, fit, student, head = (end - start for start, end in pairwise(times))
    # Seconds per token from here on: of a layer, and of the output head.
    run /= 2 * trial_tokens.numel()
    student /= 2 * trial_tokens.numel()
    both = run + student
    head /= length
    layers = source.layers
    held_out = tokens.held_out.numel()
    seconds = {}
    if request.to == "mla" and plan.method.reads_text:
        seconds["survey"] = layers * SURVEYED * run
    attention = _ATTENTION * student
    step_cost = _STEP * attention * choose_refine_batch_size(length) * length
    if request.budget is not None:
        trials = len(list_mla_specs(request, plan.model)) + FINALISTS * bool(request.refine)
        walked = layers * (TRIAL_CALIBRATION + TRIAL_HELD_OUT) * both
        seconds["splits"] = trials * (TRIAL_LAYERS * fit + walked)
    cost = fit + (tokens.calibration.numel() + held_out) * both
    if request.refine:
        steps = MOST_STEPS if request.refine == "auto" else int(request.refine)
        cost += steps * step_cost + (steps / REFINE_ROUND + 1) * held_out * attention
    seconds["convert"] = (layers - finished) * cost
    if request.polish:
        steps = count_polish_steps(request.polish, length)
        step_cost = layers * (_STEP * student + run) + (_LOGITS + 1) * head
        evaluation = held_out * (layers * student + _LOGITS * head)
        seconds["polish"] = (
            steps * count_step_tokens(length) * step_cost + (steps / POLISH_ROUND + 1) * evaluation
        )
    compared = layers * both + _LOGITS * head
    seconds["measure"] = held_out * (compared + layers * student)
    seconds["positions"] = tokens.long.numel() * compared
    return seconds
