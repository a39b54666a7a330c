"""The split of a budget into rank and rotary dims, chosen by trials that convert a few layers.

`choose_split` is the one chooser: of ``kvfold convert --budget N`` and of ``kvfold sweep --targets mla:N``.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvfold.convert import processes
from kvfold.convert.conversion.latent import Candidate, Survey, candidate, fitted_latent
from kvfold.convert.conversion.plan import Plan, latent_targets
from kvfold.convert.conversion.student import StudentWalk
from kvfold.convert.progress import Stages
from kvfold.convert.text.windows import CalibrationTokens
from kvfold.convert.transforms.latent.slots import LayerSurvey, Slots, mean_worth

# 5 takes the split 12 + 4 of a budget of 16, +0.4510 nats per token after refinement; 20 takes 8 + 8, +0.4172
# (the model that ships, by recipes/benchmarks/bench_refine_constants.py)
_TRIAL_STEPS = 20  # of refinement per layer, where splits or layouts are compared
_SERVED = 1.05  # KL that a split that more engines serve may have, relative to the best: a choice, not a measurement
# The rest bounds the cost of trials and what is recorded; none was tuned for its loss.
_FINALISTS = 4  # splits that are tried with refinement, the best as fitted
_SHOWN_SLOTS = 3  # of the spectrum that is recorded, relative to the slots that are kept
_PROBED = 4  # layers that a trial converts, of a model with more
_TRIAL_HELD_OUT = 2048  # tokens
_TRIAL_CALIBRATION = 8192  # tokens, for refinement


@dataclass(frozen=True)
class Split:
    """The split that a request named or that its budget got, and the splits that were ``tried`` for a budget."""

    option: Candidate
    tried: Sequence[Candidate] = ()


def choose_split(plan: Plan, surveyed: Survey, stages: Stages) -> Split:
    """The split and frequencies to convert to. A budget leaves several splits: each is tried, `preferred` takes one."""
    candidates = [candidate(plan, target, surveyed.layers) for target in latent_targets(plan.request, plan.model)]
    tried = [] if plan.request.budget is None else compare_splits(candidates, surveyed, stages)
    return Split(preferred(tried or candidates), tried)


def resolve(plan: Plan, surveyed: Survey, stages: Stages) -> tuple[Candidate, dict[str, Any]]:
    """The split and frequencies to convert to, and what ``kvfold.json`` says of the choice."""
    split = choose_split(plan, surveyed, stages)
    best = split.option
    record: dict[str, Any] = {"splits": [split_record(each) for each in split.tried]} if split.tried else {}
    if split.tried and (least := min(split.tried, key=lambda each: each.judged)) is not best:
        gained = [engine for engine in best.served_by if engine not in least.served_by]
        other = {**_split(least), "kl": least.drift}
        record["preferred_for_engines"] = {"engines": gained, "kl": best.drift, "instead_of": other}
    if best.target.layout == "engine":
        record["free_layout"] = _against_free(best, surveyed, stages)
    return best, {**record, **slots_record(surveyed.layers, best.slots)}


def slots_record(layers: Sequence[LayerSurvey], slots: Sequence[Slots]) -> dict[str, Any]:
    """The rotary slots of each pair, and what they are worth; only the former, by layer, where frequencies differ."""
    first = slots[0]
    if any(each is not first for each in slots):
        return {"rotary_slots_per_pair": [list(each.counts) for each in slots]}
    return {"rotary_slots_per_pair": list(first.counts), **slots_worth_record(layers, first)}


def slots_worth_record(layers: Sequence[LayerSurvey], slots: Slots) -> dict[str, Any]:
    """What rotation is worth at every frequency and slot, mean over layers, and how much of it ``slots`` keep."""
    if not slots.counts:
        return {}
    worth = mean_worth(layers)
    kept = [float(row[:count].sum()) for row, count in zip(worth, slots.counts, strict=True)]
    shown = _SHOWN_SLOTS * max(1, sum(slots.counts))
    return {
        "rotary_worth": {
            "per_pair": worth.sum(1).tolist(),
            "kept_per_pair": kept,
            "slots": sum(slots.counts),
            "sorted": worth.flatten().sort(descending=True).values[:shown].tolist(),
        }
    }


def _split(each: Candidate) -> dict[str, Any]:
    return {"kv_rank": each.target.kv_rank, "rope_dim": each.target.rope_dim}


def preferred(candidates: Sequence[Candidate]) -> Candidate:
    """The split that drifts least, or one that more engines serve where its KL is at most 5 % higher.

    Where some were refined, one of those.
    """
    least = min(candidates, key=lambda each: each.judged)
    equal = [each for each in candidates if each.refined == least.refined]
    near = [each for each in equal if each.drift <= _SERVED * least.drift]  # none where nothing was tried
    return min(near or [least], key=lambda each: (-len(each.served_by), each.drift))


def compare_splits(candidates: Sequence[Candidate], surveyed: Survey, stages: Stages) -> list[Candidate]:
    """``candidates`` after trials: all of them as fitted; then, where layers are refined, some of them once more.

    Those are the best few, and the splits that more engines serve than the best.
    """
    request = candidates[0].plan.request
    _print_trials(candidates[0].plan, f"comparing {len(candidates)} splits")
    fitted = stages.over("splits", candidates, len(candidates), "split")
    tried = [trial(each, surveyed) for each in fitted]
    if not request.refine:
        return tried
    by_drift = sorted(tried, key=lambda each: each.drift)
    engines = len(by_drift[0].served_by)
    more = [each for each in by_drift[_FINALISTS:] if len(each.served_by) > engines]
    finalists = [*by_drift[:_FINALISTS], *more]
    refined = [trial(each, surveyed, refine=True) for each in stages.over("finals", finalists, len(finalists), "split")]
    final = {each.target: each for each in refined}
    return [final.get(each.target, each) for each in tried]


def split_record(tried: Candidate) -> dict[str, Any]:
    """A split's entry of ``kvfold.json``."""
    return {**_split(tried), "kl": tried.kl, **({"refined_kl": tried.refined_kl} if tried.refined else {})}


def trial(option: Candidate, surveyed: Survey, *, refine: bool = False) -> Candidate:
    """``option`` with the drift of the model when a few of its layers are converted to it.

    With ``refine`` after a few steps of refinement of each.
    """
    probed = probed_layers(option.plan.geometry.layers)
    tokens, steps = few(surveyed.tokens), _TRIAL_STEPS if refine else 0
    walk = StudentWalk(option.plan, surveyed.source, tokens, statistics=False, trial_steps=steps)
    for step in walk.steps():
        if step.index in probed:
            walk.convert(step, processes.from_first(partial(fitted_latent, option, step.index, step, surveyed)).weights)
        else:
            step.skip()
    kl = walk.kl()
    return replace(option, refined_kl=kl) if refine else replace(option, kl=kl)


def probed_layers(layers: int, most: int = _PROBED) -> set[int]:
    """The layers that trials convert: all of a model with few of them, else ``most`` evenly spaced."""
    count = min(layers, most)
    return {(2 * place + 1) * layers // (2 * count) for place in range(count)}


def few(tokens: CalibrationTokens) -> CalibrationTokens:
    """The part of the sequences that trials use."""
    length = tokens.calibration.shape[1]
    held_out = tokens.held_out[: max(1, _TRIAL_HELD_OUT // length)]
    return replace(tokens, calibration=tokens.calibration[: max(1, _TRIAL_CALIBRATION // length)], held_out=held_out)


def _against_free(engine: Candidate, surveyed: Survey, stages: Stages) -> dict[str, Any]:
    """The drift of layout engine and of layout free with the same split, in equal trials."""
    refine = bool(engine.plan.request.refine)
    free = candidate(engine.plan, replace(engine.target, layout="free"), surveyed.layers)
    _print_trials(engine.plan, "comparing layouts")
    pending = [free] if engine.refined or (not refine and not math.isnan(engine.kl)) else [free, engine]
    made = [trial(each, surveyed, refine=refine) for each in stages.over("layouts", pending, len(pending), "layout")]
    kls = [each.drift for each in (made[0], made[-1] if len(made) > 1 else engine)]
    steps = {"steps": _TRIAL_STEPS} if refine else {}
    layers = sorted(probed_layers(engine.plan.geometry.layers))
    return {"kl": kls[0], "engine_kl": kls[1], "layers": layers, **steps}


def _print_trials(plan: Plan, what: str) -> None:
    """Print what is compared, and on how many layers, to stderr."""
    if plan.request.quiet:
        return
    layers = plan.geometry.layers
    count = len(probed_layers(layers))
    steps = f", the best with at most {_TRIAL_STEPS} steps of refinement each" if plan.request.refine else ""
    print(f"{what}: each converts {count} of {layers} layers{steps}", file=sys.stderr)
