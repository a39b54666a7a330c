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
from kvfold.convert.transforms.latent.slots import LayerSurvey, Slots, mean_worth

# Steps of refinement per layer, where splits or layouts are compared. 5 takes the split 12 + 4 of a budget of 16,
# +0.4510 nats per token after refinement; 20 takes 8 + 8, +0.4172 (the model that ships, bench_refine_constants.py).
_TRIAL_STEPS = 20
# KL that a split that more engines serve may have, relative to the best: a choice, not a measurement.
_SERVED = 1.05
# The rest bounds the cost of trials and what is recorded; none was tuned for its loss. Splits that are tried with
# refinement, the best as fitted; slots of the recorded spectrum, relative to those that are kept; layers that a trial
# converts, of a model with more; held-out tokens, and calibration tokens for refinement.
_FINALISTS, _SHOWN_SLOTS, _PROBED, _TRIAL_HELD_OUT, _TRIAL_CALIBRATION = 4, 3, 4, 2048, 8192


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


def compare_splits(candidates: Sequence[Candidate], surveyed: Survey, stages: Stages) -> list[Candidate]:
    """``candidates`` after trials: all of them as fitted; then, where layers are refined, some of them once more."""
    request = candidates[0].plan.request
    _print_trials(candidates[0].plan, f"comparing {len(candidates)} splits")
    fitted = stages.over("splits", candidates, len(candidates), "split")
    tried = [trial(each, surveyed) for each in fitted]
    if not request.refine:
        return tried
    # Refined are the best few, and the splits that more engines serve than the best.
    by_drift = sorted(tried, key=lambda each: each.kl)
    engines = len(by_drift[0].served_by)
    more = [each for each in by_drift[_FINALISTS:] if len(each.served_by) > engines]
    finalists = [*by_drift[:_FINALISTS], *more]
    refined = [trial(each, surveyed, refine=True) for each in stages.over("finals", finalists, len(finalists), "split")]
    final = {each.target: each for each in refined}
    return [final.get(each.target, each) for each in tried]


def preferred(candidates: Sequence[Candidate]) -> Candidate:
    """The split that drifts least, or one that more engines serve where its KL is at most 5 % higher.

    Where some were refined, one of these.
    """
    unrefined, least = min(each.judged for each in candidates)
    near = [each for each in candidates if each.judged[0] == unrefined and each.judged[1] <= _SERVED * least]
    # Where nothing was tried all KL are NaN: the first, as the engines decide.
    return min(near or candidates[:1], key=lambda each: (-len(each.served_by), each.judged))


def resolve(plan: Plan, surveyed: Survey, stages: Stages) -> tuple[Candidate, dict[str, Any]]:
    """The split and frequencies to convert to, and what ``kvfold.json`` says of the choice."""
    split = choose_split(plan, surveyed, stages)
    best, record = split.option, dict[str, Any]()
    if split.tried:
        record["splits"] = [split_record(each) for each in split.tried]
        least = min(split.tried, key=lambda each: each.judged)
        if least is not best:
            gained = [engine for engine in best.served_by if engine not in least.served_by]
            other = {"kv_rank": least.target.kv_rank, "rope_dim": least.target.rope_dim, "kl": least.judged[1]}
            record["preferred_for_engines"] = {"engines": gained, "kl": best.judged[1], "instead_of": other}
    if best.target.layout == "engine":
        record["free_layout"] = _against_free(best, surveyed, stages)
    # Stock classes have the same slots in all layers; where frequencies differ there is a list for each.
    first = best.slots[0]
    if any(each is not first for each in best.slots):
        record["rotary_slots_per_pair"] = [list(each.counts) for each in best.slots]
    else:
        record["rotary_slots_per_pair"] = list(first.counts)
        record |= _slots_worth(surveyed.layers, first)
    return best, record


def _slots_worth(layers: Sequence[LayerSurvey], slots: Slots) -> dict[str, Any]:
    """The worth of rotation at every frequency and slot, mean over layers, and how much of it ``slots`` keep."""
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


def split_record(tried: Candidate) -> dict[str, Any]:
    """A split's entry of ``kvfold.json``."""
    record = {"kv_rank": tried.target.kv_rank, "rope_dim": tried.target.rope_dim, "kl": tried.kl}
    return record if tried.refined_kl is None else {**record, "refined_kl": tried.refined_kl}


def trial(option: Candidate, surveyed: Survey, *, refine: bool = False) -> Candidate:
    """``option`` with the drift of the model when a few of its layers are converted to it.

    With ``refine`` after a few steps of refinement of each.
    """
    probed, tokens = probed_layers(option.plan.geometry.layers), surveyed.tokens
    length = tokens.calibration.shape[1]
    tokens = replace(
        tokens,
        calibration=tokens.calibration[: max(1, _TRIAL_CALIBRATION // length)],
        held_out=tokens.held_out[: max(1, _TRIAL_HELD_OUT // length)],
    )
    steps = _TRIAL_STEPS if refine else 0
    walk = StudentWalk(option.plan, surveyed.source, tokens, statistics=False, trial_steps=steps)
    for step in walk.steps:
        if step.index in probed:
            walk.convert(step, processes.from_first(partial(fitted_latent, option, step.index, step, surveyed)).weights)
        else:
            step.skip()
    kl = processes.from_first(lambda: walk.measurement().kl)
    return replace(option, refined_kl=kl) if refine else replace(option, kl=kl)


def probed_layers(layers: int) -> set[int]:
    """The layers that trials convert: all of a model with few of them, else some that are evenly spaced."""
    count = min(layers, _PROBED)
    return {(2 * place + 1) * layers // (2 * count) for place in range(count)}


def _against_free(engine: Candidate, surveyed: Survey, stages: Stages) -> dict[str, Any]:
    """The drift of layout engine and of layout free with the same split, in equal trials."""
    refine, layers = bool(engine.plan.request.refine), engine.plan.geometry.layers
    free = candidate(engine.plan, replace(engine.target, layout="free"), surveyed.layers)
    _print_trials(engine.plan, "comparing layouts")
    # A budget has tried the engine's already, unless its layers were to be refined and its trial was not.
    tried = engine.refined_kl is not None or (not refine and not math.isnan(engine.kl))
    pending = [free] if tried else [free, engine]
    made = [trial(each, surveyed, refine=refine) for each in stages.over("layouts", pending, len(pending), "layout")]
    kls = {"kl": made[0].judged[1], "engine_kl": (engine if tried else made[1]).judged[1]}
    return {**kls, "layers": sorted(probed_layers(layers)), **({"steps": _TRIAL_STEPS} if refine else {})}


def _print_trials(plan: Plan, what: str) -> None:
    """Print what is compared, and on how many layers, to stderr."""
    layers = plan.geometry.layers
    steps = f", the best with at most {_TRIAL_STEPS} steps of refinement each" if plan.request.refine else ""
    if not plan.request.quiet:
        print(f"{what}: each converts {len(probed_layers(layers))} of {layers} layers{steps}", file=sys.stderr)
