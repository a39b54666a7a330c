"""Estimate the time of a calibrated conversion or a sweep, by a trial of its first layer on a few
tokens.
"""

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from kvfold.attention.drift.report import select_floor_tokens
from kvfold.convert import processes
from kvfold.convert.conversion.calibration import Calibration
from kvfold.convert.conversion.layers import convert_layer, make_walk
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
# is computed from two models' logits, in about a third of their time; for its rounding floor the
# source runs in float64. Chosen, not tuned.
_STEP = 3.0
_ATTENTION = 0.5
_LOGITS = 2.7
_FLOOR = 1.5


class LayerTrial(NamedTuple):
    """Seconds that layer 0 and the output head take: to fit the layer, and per token to run it in
    the source, to run it in the student, and to compute logits.
    """

    fit: float
    run: float
    student: float
    head: float


def announce_conversion(
    plan: Plan, calibration: Calibration, finished: int, stages: ProgressStages
) -> None:
    """Convert layer 0 as a trial on a few tokens, whose result is discarded, and print the stages
    of the run with the time that each will take by this trial; ``stages`` gets the times too.

    The ``finished`` layers of an interrupted run take no time. Does nothing if the run is quiet,
    has a progress callback or several processes.
    """
    if stages.quiet or stages.progress or processes.world_size() > 1:
        return
    with stages("trying the first layer"):
        stages.estimates |= estimate_stages(plan, calibration, finished)
    _print_stages([stages.estimates])


def announce_sweep(
    groups: Sequence[Collection[Plan]], calibration: Calibration, stages: ProgressStages
) -> list[dict[str, float]]:
    """Like `announce_conversion`, for a sweep over ``groups`` of targets that share the run of the
    source; the first of each group is tried. Returns the seconds of the stages of each group by
    name; nothing of a sweep that is not announced.
    """
    if stages.quiet or stages.progress:
        return [{} for _ in groups]
    with stages("trying the first layer"):
        estimates = [estimate_sweep_stages([*group], calibration) for group in groups]
    _print_stages(estimates)
    return estimates


def _print_stages(estimates: Sequence[Mapping[str, float]]) -> None:
    """Print the seconds of each stage, summed over ``estimates``, and of all together."""
    names = dict.fromkeys(name for seconds in estimates for name in seconds)
    sums = {name: sum(seconds.get(name, 0.0) for seconds in estimates) for name in names}
    times = [f"{name} {format_duration(time)}" for name, time in sums.items() if time]
    total = format_duration(sum(sums.values()))
    line = f"{', '.join(times)}: about {total} in all, at the machine's speed in a trial just now"
    print(format_labeled_rows([("stages", line)]), file=sys.stderr)


def estimate_stages(plan: Plan, calibration: Calibration, finished: int) -> dict[str, float]:
    """Return about how many seconds each stage of the run takes, by name; converts layer 0 on a
    few tokens to measure it.
    """
    request = plan.request
    tokens = calibration.tokens
    length = request.calibration_length
    layers = calibration.source.layers
    trial = try_first_layer(plan, calibration)
    held_out = tokens.held_out.numel()
    seconds = _estimate_fits(plan, calibration, trial, layers - finished)
    if request.polish:
        steps = count_polish_steps(request.polish, length)
        step_cost = layers * (_STEP * trial.student + trial.run) + (_LOGITS + 1) * trial.head
        evaluation = held_out * (layers * trial.student + _LOGITS * trial.head)
        seconds["polish"] = (
            steps * count_step_tokens(length) * step_cost + (steps / POLISH_ROUND + 1) * evaluation
        )
    compared = layers * (trial.run + trial.student) + _LOGITS * trial.head
    measured = held_out + _FLOOR * select_floor_tokens(tokens.held_out).numel()
    seconds["measure"] = measured * (compared + layers * trial.student)
    seconds["positions"] = tokens.long.numel() * compared
    return seconds


def estimate_sweep_stages(plans: Sequence[Plan], calibration: Calibration) -> dict[str, float]:
    """Return about how many seconds each stage of a sweep over ``plans``, which share the run of
    the source, takes, by name; converts layer 0 by the first on a few tokens to measure it.
    """
    layers = calibration.source.layers
    trial = try_first_layer(plans[0], calibration)
    shared = trial._replace(run=trial.run / len(plans))
    fits = [_estimate_fits(plan, calibration, shared, layers) for plan in plans]
    measured = len(plans) * calibration.tokens.held_out.numel()
    return {
        "survey": sum(seconds.get("survey", 0.0) for seconds in fits),
        "splits": sum(seconds.get("splits", 0.0) for seconds in fits),
        "sweep": sum(seconds["convert"] for seconds in fits),
        "measure": measured * _LOGITS * trial.head,
    }


def _estimate_fits(
    plan: Plan, calibration: Calibration, trial: LayerTrial, layers: int
) -> dict[str, float]:
    """Return about how many seconds it takes to convert ``layers`` layers, and the stages before
    it, by name.
    """
    request = plan.request
    tokens = calibration.tokens
    length = request.calibration_length
    both = trial.run + trial.student
    attention = _ATTENTION * trial.student
    held_out = tokens.held_out.numel()
    depth = calibration.source.layers
    seconds = {}
    if request.to == "mla" and plan.method.reads_text:
        seconds["survey"] = depth * SURVEYED * trial.run
    if request.budget is not None:
        trials = len(list_mla_specs(request, plan.model)) + FINALISTS * bool(request.refine)
        walked = depth * (TRIAL_CALIBRATION + TRIAL_HELD_OUT) * both
        seconds["splits"] = trials * (TRIAL_LAYERS * trial.fit + walked)
    cost = trial.fit + (tokens.calibration.numel() + held_out) * both
    if request.refine:
        steps = MOST_STEPS if request.refine == "auto" else int(request.refine)
        step_cost = _STEP * attention * choose_refine_batch_size(length) * length
        cost += steps * step_cost + (steps / REFINE_ROUND + 1) * held_out * attention
    seconds["convert"] = layers * cost
    return seconds


def try_first_layer(plan: Plan, calibration: Calibration) -> LayerTrial:
    """Convert layer 0 on a few tokens, and return the measured times."""
    source = calibration.source
    length = plan.request.calibration_length
    tokens = calibration.tokens.calibration[: max(1, _TRIAL_TOKENS // length)]
    if plan.mla_spec is not None:
        plan = plan.with_rotary_slots(choose_slots_of_all_layers(plan, []))
    text = replace(calibration.tokens, calibration=tokens, held_out=tokens)
    walk = make_walk(plan, replace(calibration, tokens=text), 1, 0)
    # What is loaded at a first call counts for no layer.
    hidden = embed_tokens(source, tokens[:1, :8])[0]
    with source.open_layer(0) as layer:
        layer(hidden)
    times = [time.monotonic()]
    step = next(iter(walk))
    times.append(time.monotonic())
    tensors, _ = convert_layer(plan, step, 0)
    times.append(time.monotonic())
    step.advance_student(tensors)
    times.append(time.monotonic())
    source.compute_logits(hidden)
    times.append(time.monotonic())
    source.compute_logits(step.held_out[0][:1])
    times.append(time.monotonic())
    run, fit, student, _, head = (end - start for start, end in pairwise(times))
    passed = 2 * tokens.numel()
    return LayerTrial(fit, run / passed, student / passed, head / length)
