"""Choose which rotary pairs the MLA keys keep, by statistics of all layers, and how a cache budget
divides into latent channels and rotary dims, by trial conversions.

All layers of a stock class share their rotary frequencies, so every layer is surveyed before any is
converted; in layout ``kvfold`` each layer has its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvfold.convert.conversion.calibration import Calibration
from kvfold.convert.conversion.layers import (
    convert_layer,
    count_visible_positions,
    make_walk,
    read_source_layer,
)
from kvfold.convert.conversion.plan import Plan, list_mla_specs, plan_mla
from kvfold.convert.device import choose_fit_device
from kvfold.convert.families.layer_io import make_layer_rotary
from kvfold.convert.progress import ProgressStages
from kvfold.convert.targets.mla.layout import fit_yarn_parameters
from kvfold.convert.targets.mla.spec import MlaSpec
from kvfold.convert.transforms.head_norms import linearize_norms
from kvfold.convert.transforms.latent import slots as rope_slots
from kvfold.convert.transforms.latent.slots import LayerSurvey, RotarySlots
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.walk import embed_tokens, gather_statistics

# Steps of refinement per layer, where splits or layouts are compared. 5 takes the split 12 + 4 of a
# budget of 16, +0.4510 nats per token after refinement; 20 takes 8 + 8, +0.4172 (the model that
# ships, measured by a script in git history, 2026-11-22).
_TRIAL_STEPS = 20
# Tokens of the survey, which chooses frequencies for all layers at once; each layer is fitted to
# all tokens. The reference MHA model as MLA 48 + 16 takes equal ones from 1024 and 4096
# (2026-11-28). Trials of splits are fitted to tokens of the survey, so it takes more for them.
SURVEYED = 1024
TRIAL_SURVEYED = 4096
# KL that a split that more engines serve may have, relative to the best: chosen, not tuned.
_SERVED_FACTOR = 1.05
# The rest bounds the cost of trials and what is recorded; none was tuned for its loss. Splits that
# are tried with refinement, the best as fitted; layers that a trial converts, of a model with more;
# held-out tokens, and calibration tokens for refinement.
FINALISTS = 4
TRIAL_LAYERS = 4
TRIAL_HELD_OUT = 2048
TRIAL_CALIBRATION = 8192


@dataclass(frozen=True)
class SourceSurvey:
    """Statistics of the source's layers by which an MLA conversion chooses its rotary pairs and
    compares splits of the cache.

    layers: what each rotary key of each layer is worth; empty without text.
    statistics: of the layers that trials convert, by index, with attention inputs ``[n, E]``;
        empty without trials.
    """

    layers: Sequence[LayerSurvey]
    statistics: Mapping[int, tuple[LayerStatistics, Tensor]]


@dataclass
class SplitTrial:
    """One split of the MLA cache into latent channels and rotary dims that was tried, with its
    measured KL divergence.

    plan: the plan of the conversion with this split.
    kl: the KL in nats per token with a few layers converted, as fitted.
    refined_kl: the same after a few steps of refinement; None if not measured.
    """

    plan: Plan
    kl: float
    refined_kl: float | None = None

    def sort_key(self) -> tuple[bool, float]:
        """Return the key by which trials are sorted, best first: trials measured after refinement
        come before the others, then by KL divergence; NaN comes last.
        """
        kl = self.kl if self.refined_kl is None else self.refined_kl
        return self.refined_kl is None, math.inf if math.isnan(kl) else kl

    def count_engines(self) -> int:
        """Return the number of inference engines that can serve a model with this split."""
        return sum(support.serves for support in self.plan.engines)

    def to_dict(self) -> dict[str, Any]:
        """Return the split and its KL divergences as JSON values; without ``refined_kl`` if it was
        not measured.
        """
        spec = self.plan.mla_spec
        assert spec is not None
        values = {"kv_rank": spec.kv_rank, "rope_dim": spec.rope_dim, "kl": self.kl}
        return values | ({} if self.refined_kl is None else {"refined_kl": self.refined_kl})


def survey_layers(
    plan: Plan, calibration: Calibration | None, stages: ProgressStages, trials: bool
) -> SourceSurvey:
    """Run some calibration tokens through every layer of the source, and return how much attention
    depends on each rotary pair of its keys; nothing if the method reads no text. Statistics of
    layers are kept only if ``trials`` of splits follow.
    """
    if calibration is None or not plan.method.reads_text:
        return SourceSurvey([], {})
    source = calibration.source
    surveyed = TRIAL_SURVEYED if trials else SURVEYED
    count = math.ceil(surveyed / plan.request.calibration_length)
    states = embed_tokens(source, calibration.tokens.calibration[:count])
    surveys = []
    probes = {}
    number = min(source.layers, TRIAL_LAYERS)
    probed = {(2 * trial + 1) * source.layers // (2 * number) for trial in range(number)}
    device = choose_fit_device(source.device)
    for index in stages.iterate_over("survey", range(source.layers), source.layers, "layer"):
        with source.open_layer(index) as layer:
            statistics, inputs = gather_statistics(source, layer, states, plan.model)
        statistics = statistics.to(device)
        weights = linearize_norms(read_source_layer(plan, index).to(device), statistics)
        rotary = make_layer_rotary(plan.model, index)
        context = count_visible_positions(plan.model, index)
        surveys.append(rope_slots.survey_layer(weights, statistics, rotary, context))
        if trials and index in probed:
            probes[index] = statistics, inputs
    return SourceSurvey(surveys, probes)


def choose_slots_of_all_layers(plan: Plan, surveys: Sequence[LayerSurvey]) -> list[RotarySlots]:
    """Return the rotary pairs (slots) that the MLA keys of each layer keep, chosen by the
    statistics in ``surveys``, one per layer. With layout ``engine``, each kept pair rotates at the
    frequency that inference engines compute, which may differ from the source's.

    Without surveys, the choice is a uniform stride over the source's frequencies.
    """
    spec = plan.mla_spec
    assert spec is not None
    thetas = [make_layer_rotary(plan.model, layer).theta for layer in range(plan.geometry.layers)]
    first = next((layer for layer, theta in enumerate(thetas) if theta.numel()), None)
    if first is None:
        return [rope_slots.NO_SLOTS] * len(thetas)
    if spec.layout != "kvfold":
        # A stock class has the same frequencies in all layers.
        return [_choose_shared_slots(plan, spec, thetas[first], surveys)] * len(thetas)
    # Layers that do not rotate have the slots of the first layer that does.
    rotating = [layer if theta.numel() else first for layer, theta in enumerate(thetas)]
    return [
        _choose_shared_slots(plan, spec, thetas[layer], surveys[layer : layer + 1])
        for layer in rotating
    ]


def _choose_shared_slots(
    plan: Plan, spec: MlaSpec, theta: Tensor, surveys: Sequence[LayerSurvey]
) -> RotarySlots:
    """Return the rotary slots of layers that have the same frequencies, chosen by their
    ``surveys``; without any, at a uniform stride over ``theta``.
    """
    rope_dim = spec.count_used_rope_dims(plan.geometry.rotary_dims)
    if not surveys:
        return rope_slots.spread_rotary_slots(theta, spec.rope_dim)
    if spec.layout != "engine":
        return rope_slots.choose_rotary_slots(surveys, rope_dim)
    chosen = rope_slots.choose_stepped_rotary_slots(surveys, rope_dim)
    _, cached = fit_yarn_parameters(plan.model, spec, chosen.theta.tolist())
    return replace(chosen, theta=torch.tensor(cached, dtype=torch.float64))


def choose_slots_and_split(
    plan: Plan, calibration: Calibration | None, survey: SourceSurvey, stages: ProgressStages
) -> tuple[Plan, list[dict[str, Any]]]:
    """Return the plan with the rotary pairs (slots) that the MLA keys of each layer keep and, for
    ``--budget``, the best split of the cache into latent channels and rotary dims. Also returns all
    splits tried, as JSON values.
    """
    request = plan.request
    if calibration is None or request.budget is None:
        return plan.with_rotary_slots(choose_slots_of_all_layers(plan, survey.layers)), []
    plans = [
        plan_mla(request, plan.checkpoint, plan.model, spec)
        for spec in list_mla_specs(request, plan.model)
    ]
    trials = []
    for split in stages.iterate_over("splits", plans, len(plans), "split"):
        split = split.with_rotary_slots(choose_slots_of_all_layers(split, survey.layers))
        trials.append(SplitTrial(split, convert_and_measure_kl(split, calibration, survey)))
    if request.refine:
        # Refined are the best few, and the splits that more engines serve than the best.
        ranked = sorted(trials, key=SplitTrial.sort_key)
        served = ranked[0].count_engines()
        more = [trial for trial in ranked[FINALISTS:] if trial.count_engines() > served]
        finalists = [*ranked[:FINALISTS], *more]
        for trial in stages.iterate_over("finals", finalists, len(finalists), "split"):
            trial.refined_kl = convert_and_measure_kl(trial.plan, calibration, survey, _TRIAL_STEPS)
    return choose_best_trial(trials).plan, [trial.to_dict() for trial in trials]


def choose_best_trial(trials: Sequence[SplitTrial]) -> SplitTrial:
    """Return the trial with the lowest KL divergence, or one that more engines can serve if its KL
    is at most 5 % higher.

    If some trials were refined, the choice is among them.
    """
    unrefined, kl = min(trial.sort_key() for trial in trials)
    near = [trial for trial in trials if trial.sort_key() <= (unrefined, _SERVED_FACTOR * kl)]
    return min(near, key=lambda trial: (-trial.count_engines(), trial.sort_key()))


def convert_and_measure_kl(
    plan: Plan, calibration: Calibration, survey: SourceSurvey, refine: int = 0
) -> float:
    """Convert a few layers by ``plan``, train them for ``refine`` steps, and return the KL
    divergence from the source on held-out text, in nats per token.
    """
    tokens = calibration.tokens
    length = tokens.calibration.shape[1]
    tokens = replace(
        tokens,
        calibration=tokens.calibration[: max(1, TRIAL_CALIBRATION // length)],
        held_out=tokens.held_out[: max(1, TRIAL_HELD_OUT // length)],
    )
    walk = make_walk(plan, replace(calibration, tokens=tokens), refine, plan.geometry.layers)
    for walk_layer in walk:
        if walk_layer.index in survey.statistics:
            walk_layer.statistics, walk_layer.inputs = survey.statistics[walk_layer.index]
            tensors, _ = convert_layer(plan, walk_layer, refine)
            walk_layer.advance_student(tensors)
        else:
            walk_layer.advance_student_unchanged()
    return walk.measure_drift().kl
