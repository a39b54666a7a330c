"""The split of every budget of a sweep, chosen by the errors of a few layers rather than by whole trials.

``kvfold convert --budget`` walks the model once for every split. Here the source walks once for all splits of all
budgets, no further than the last layer that is tried. A split is fitted roughly and judged as a sink or a grouping is,
by the error of the attention's output on held-out text, given the source's own inputs. The worse half of a budget's
splits in one layer is not tried in the next.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvfold.convert.conversion.latent_layer import Candidate, Survey, candidate, sketched_layer
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.possible import latent_targets
from kvfold.convert.conversion.trials import few, probed_layers
from kvfold.convert.progress import Stages
from kvfold.convert.walk.walk import Step, Student, Teacher, TeacherLayer

_PROBED = 2  # layers


@dataclass
class Tried:
    """A split under trial: its student, and its relative error in each layer so far."""

    option: Candidate
    twin: Student
    errors: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        return math.fsum(self.errors) / len(self.errors)


@dataclass(frozen=True)
class Split:
    """The split that a request named or that its budget got; ``tried`` are the splits compared, none for a request's.

    Each has ``kv_rank``, ``rope_dim`` and ``error``, the mean of ``||y - y'||^2 / ||y||^2`` over the ``layers`` that it
    was tried in.
    """

    option: Candidate
    tried: list[dict[str, Any]] = field(default_factory=list)


def choose_splits(plans: Sequence[Plan], surveyed: Survey, stages: Stages) -> list[Split]:
    """For every MLA plan its split, with the rotary slots that suit it."""
    options = [
        [candidate(plan, target, surveyed.layers) for target in latent_targets(plan.request, plan.model)]
        for plan in plans
    ]
    contests = {place: _tried(some, surveyed) for place, some in enumerate(options) if len(some) > 1}
    _try_all(list(contests.values()), surveyed, stages)
    return [_chosen(contests[place]) if place in contests else Split(some[0]) for place, some in enumerate(options)]


def _tried(options: Sequence[Candidate], surveyed: Survey) -> list[Tried]:
    def twin(plan: Plan) -> Student:
        return Student(surveyed.source, plan.layout.config, plan.layout.tensors, recast=plan.request.dtype != "auto")

    return [Tried(option, twin(option.plan)) for option in options]


def _try_all(contests: Sequence[Sequence[Tried]], surveyed: Survey, stages: Stages) -> None:
    """Note the errors of each budget's splits, layer by layer; the better half of one layer goes on to the next."""
    if not contests:
        return
    probed = sorted(probed_layers(contests[0][0].option.plan.geometry.layers, _PROBED))
    teacher = Teacher(surveyed.source, few(surveyed.tokens).held_out)
    left = [list(contest) for contest in contests]
    with stages("splits", sum(_trials(len(contest), len(probed)) for contest in contests), "split") as advance:
        for lesson in teacher.layers():
            if lesson.index not in probed:
                continue
            for each in chain.from_iterable(left):
                each.errors.append(_error(each, lesson, surveyed))
                advance(1)
            if lesson.index == probed[-1]:
                return
            left = [sorted(some, key=lambda each: each.error)[: _half(len(some))] for some in left]


def _trials(splits: int, layers: int) -> int:
    """How many times one of ``splits`` is tried in a layer."""
    return 0 if not layers else splits + _trials(_half(splits), layers - 1)


def _half(count: int) -> int:
    return (count + 1) // 2


def _error(each: Tried, lesson: TeacherLayer, surveyed: Survey) -> float:
    inputs = lesson.held_out
    step = Step(lesson.index, lesson.layer, each.twin, list(inputs), list(inputs), list(lesson.outputs))
    latent = sketched_layer(each.option, lesson.index, surveyed)
    return step.attention_error(each.option.plan.layout.encode(lesson.index, latent))


def _chosen(contest: Sequence[Tried]) -> Split:
    layers = max(len(each.errors) for each in contest)
    best = min((each for each in contest if len(each.errors) == layers), key=lambda each: each.error)
    return Split(best.option, [_record(each) for each in contest])


def _record(each: Tried) -> dict[str, Any]:
    target = each.option.target
    return {
        "kv_rank": target.kv_rank,
        "rope_dim": target.rope_dim,
        "error": each.error,
        "layers": len(each.errors),
    }
