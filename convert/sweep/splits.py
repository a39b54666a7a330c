"""The split of every budget of a sweep, chosen by the errors of a few layers rather than by whole trials.

``kvfold convert --budget`` walks the model once for every split. Here the source walks once for all splits of all
budgets, no further than the last layer that is tried. A split is fitted roughly and judged as a sink or a grouping is,
by the error of the attention's output on held-out text, given the source's own inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfold.convert.conversion.latent_layer import Candidate, Survey, candidate, sketched_layer
from kvfold.convert.conversion.plan import Plan, latent_targets
from kvfold.convert.conversion.stages import Stages
from kvfold.convert.conversion.trials import few, probed_layers
from kvfold.convert.walk.twin import Twin
from kvfold.convert.walk.walk import Lesson, Step, Teacher

_PROBED = 2  # layers


@dataclass
class Tried:
    """A split under trial: its student, and the sum of its relative errors so far."""

    option: Candidate
    twin: Twin
    error: float = 0.0


@dataclass(frozen=True)
class Split:
    """The split that a request named or that its budget got; ``tried`` are the splits compared, none for a request's.

    Each has ``kv_rank``, ``rope_dim`` and ``error``, the mean over the layers tried of ``||y - y'||^2 / ||y||^2``.
    """

    option: Candidate
    tried: list[dict[str, Any]] = field(default_factory=list)


def choose_splits(plans: Sequence[Plan], surveyed: Survey, stages: Stages) -> list[Split]:
    """For every MLA plan its split, with the rotary slots that suit it."""
    options = [
        [candidate(plan, target, surveyed.layers) for target in latent_targets(plan.request, plan.model)]
        for plan in plans
    ]
    open_ones = {place: _tried(some, surveyed) for place, some in enumerate(options) if len(some) > 1}
    _try_all([each for some in open_ones.values() for each in some], surveyed, stages)
    return [_chosen(open_ones[place]) if place in open_ones else Split(some[0]) for place, some in enumerate(options)]


def _tried(options: Sequence[Candidate], surveyed: Survey) -> list[Tried]:
    def twin(plan: Plan) -> Twin:
        return Twin(surveyed.source, plan.layout.config, plan.layout.tensors, recast=plan.request.dtype != "auto")

    return [Tried(option, twin(option.plan)) for option in options]


def _try_all(tried: Sequence[Tried], surveyed: Survey, stages: Stages) -> None:
    """Add up the errors of all splits in the layers that are tried."""
    if not tried:
        return
    probed = probed_layers(tried[0].option.plan.geometry.layers, _PROBED)
    teacher = Teacher(surveyed.source, few(surveyed.tokens).held_out)
    with stages("splits", len(tried) * len(probed), "split") as advance:
        for lesson in teacher.lessons():
            if lesson.index in probed:
                for each in tried:
                    each.error += _error(each, lesson, surveyed) / len(probed)
                    advance(1)
            if lesson.index == max(probed):
                return


def _error(each: Tried, lesson: Lesson, surveyed: Survey) -> float:
    inputs = lesson.held_out
    step = Step(lesson.index, lesson.layer, each.twin, list(inputs), list(inputs), list(lesson.outputs))
    latent = sketched_layer(each.option, lesson.index, surveyed)
    return step.attention_error(each.option.plan.layout.encode(lesson.index, latent))


def _chosen(tried: Sequence[Tried]) -> Split:
    best = min(tried, key=lambda each: each.error)
    return Split(best.option, [_record(each) for each in tried])


def _record(each: Tried) -> dict[str, Any]:
    target = each.option.target
    return {"kv_rank": target.kv_rank, "rope_dim": target.rope_dim, "error": each.error}
