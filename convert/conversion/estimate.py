"""Estimate the time of a calibrated conversion or a sweep, by a trial of its first layer on a few
tokens.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from kvfold.convert.conversion.calibration import Calibration, measure_logits_share
from kvfold.convert.conversion.layers import convert_layer, make_walk
from kvfold.convert.conversion.plan import Plan, list_mla_specs
from kvfold.convert.conversion.splits import (
    FINALISTS,
    SURVEYED,
    TRIAL_CALIBRATION,
    TRIAL_HELD_OUT,
    TRIAL_LAYERS,
    TRIAL_SURVEYED,
    choose_slots_of_all_layers,
)
from kvfold.convert.formatting import format_duration, format_labeled_rows
from kvfold.convert.progress import ProgressStages
from kvfold.convert.training.budget import (
    choose_refine_batch_size,
    count_polish_steps,
    count_step_tokens,
)
from kvfold.convert.training.refine import MOST_STEPS

_TRIAL_TOKENS = 2048  # chosen, not tuned
# Costs relative to a forward pass: of a training step, and of the attention in a layer. Of the
# logits in a training step, relative to the comparison of two models' logits. Chosen, not tuned;
# what takes less than a tenth of a stage, such as evaluations during training, is left out.
_STEP = 3.0
_ATTENTION = 0.5
_TRAINED_LOGITS = 1.4


def announce_stages(
    stage: str,
    groups: Sequence[Collection[Plan]],
    calibration: Calibration,
    stages: ProgressStages,
    finished: int = 0,
) -> list[dict[str, float]]:
    """Convert layer 0 as a trial on a few tokens, whose result is discarded, and print the stages
    of the run with the time that each will take by this trial. Returns the seconds by name for each
    group.

    The plans of a group share the run of the source; the first of each is tried. ``stage`` converts
    their layers: ``"convert"``, or ``"sweep"``, which compares predictions alone afterwards. The
    ``finished`` layers of an interrupted run take no time. Returns nothing if the run is quiet or
    has a progress callback.
    """
    if stages.quiet or stages.progress:
        return [{} for _ in groups]
    with stages("trying the first layer"):
        estimates = [_estimate_stages(stage, [*plans], calibration, finished) for plans in groups]
    names = dict.fromkeys(name for seconds in estimates for name in seconds)
    sums = {name: sum(seconds.get(name, 0.0) for seconds in estimates) for name in names}
    times = [f"{name} {format_duration(time)}" for name, time in sums.items() if time]
    total = format_duration(sum(sums.values()))
    line = f"{', '.join(times)}: about {total} in all, at the machine's speed in a trial just now"
    print(format_labeled_rows([("stages", line)]), file=sys.stderr)
    return estimates


def _estimate_stages(
    stage: str, plans: Sequence[Plan], calibration: Calibration, finished: int
) -> dict[str, float]:
    """Return about how many seconds each stage takes, by name, for ``plans`` that share the run of
    the source; converts layer 0 by the first on a few tokens to measure it.
    """
    tokens = calibration.tokens
    source = calibration.source
    fit, run, student = try_first_layer(plans[0], calibration)
    shared_run = run / len(plans)
    students = source.layers * student
    both = source.layers * (shared_run + student)
    shapes = (weight.shape for weight in source.weights.expected.values())
    logits = 2 * students * measure_logits_share(shapes, source.vocabulary)
    held_out = tokens.held_out.numel()
    seconds: dict[str, float] = defaultdict(float)
    for plan in plans:
        request = plan.request
        length = request.calibration_length
        if request.to == "mla" and plan.method.reads_text:
            surveyed = SURVEYED if request.budget is None else TRIAL_SURVEYED
            seconds["survey"] += source.layers * surveyed * shared_run
        if request.budget is not None:
            trials = len(list_mla_specs(request, plan.model)) + FINALISTS * bool(request.refine)
            walked = (TRIAL_CALIBRATION + TRIAL_HELD_OUT) * both
            seconds["splits"] += trials * (TRIAL_LAYERS * fit + walked)
        steps = MOST_STEPS if request.refine == "auto" else int(request.refine)
        refined = steps * choose_refine_batch_size(length) * length
        walked = tokens.calibration.numel() + held_out
        layer = fit + walked * (shared_run + student) + refined * _STEP * _ATTENTION * student
        seconds[stage] += (source.layers - finished) * layer
        if stage == "sweep":
            seconds["measure"] += held_out * logits
            continue
        measured = held_out * logits
        if request.polish:
            steps = count_polish_steps(request.polish, length)
            step_cost = both + (_STEP - 1) * students + _TRAINED_LOGITS * logits
            seconds["polish"] = steps * count_step_tokens(length) * step_cost
            measured += held_out * (both + students)
        else:  # layers are compared as they are converted
            seconds[stage] += (source.layers - finished) * held_out * student
        seconds["measure"] = measured
        seconds["positions"] = tokens.long.numel() * (both + logits)
    return seconds


def try_first_layer(plan: Plan, calibration: Calibration) -> tuple[float, float, float]:
    """Convert layer 0 on a few tokens. Returns the seconds to fit it, and those per token to run it
    in the source and in the student.
    """
    source = calibration.source
    tokens = calibration.tokens.calibration
    tokens = tokens[: max(1, _TRIAL_TOKENS // tokens.shape[1])]
    if plan.mla_spec is not None:
        plan = plan.with_rotary_slots(choose_slots_of_all_layers(plan, []))
    text = replace(calibration.tokens, calibration=tokens, held_out=tokens)
    walk = make_walk(plan, replace(calibration, tokens=text), 1, 0)
    # What is loaded at a first call counts for no layer.
    with source.open_layer(0) as layer:
        layer(source.embed(tokens[:1, :8]))
    times = [time.monotonic()]
    step = next(iter(walk))
    times.append(time.monotonic())
    tensors, _ = convert_layer(plan, step, 0)
    times.append(time.monotonic())
    step.advance_student(tensors)
    times.append(time.monotonic())
    run, fit, student = (end - start for start, end in pairwise(times))
    passed = 2 * tokens.numel()
    return fit, run / passed, student / passed
