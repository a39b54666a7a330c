"""Choose the layout of an MLA result: survey all layers for their rotary slots, and compare splits
of a budget.

All layers of a stock class share their rotary frequencies, so every layer is surveyed before any is
converted.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvfold.convert import processes
from kvfold.convert.conversion.calibration import Calibration
from kvfold.convert.conversion.layers import convert_layer, open_walk, source_layer
from kvfold.convert.conversion.plan import Plan, mla_specs, plan_mla
from kvfold.convert.families.layer_io import layer_rotary
from kvfold.convert.progress import Stages
from kvfold.convert.targets.mla.spec import MlaSpec
from kvfold.convert.transforms.head_norms import linearize_heads
from kvfold.convert.transforms.latent import slots as rope_slots
from kvfold.convert.transforms.latent.slots import LayerSurvey, Slots
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.walk import embed, gather_statistics

# Steps of refinement per layer, where splits or layouts are compared. 5 takes the split 12 + 4 of a
# budget of 16, +0.4510 nats per token after refinement; 20 takes 8 + 8, +0.4172 (the model that
# ships, bench_refine_constants.py, 2026-11-22).
_TRIAL_STEPS = 20
# Tokens of the survey, which chooses splits and frequencies for all layers at once; each layer is
# fitted to all tokens.
_SURVEYED = 4096
# KL that a split that more engines serve may have, relative to the best: chosen, not tuned.
_SERVED_FACTOR = 1.05
# The rest bounds the cost of trials and what is recorded; none was tuned for its loss. Splits that
# are tried with refinement, the best as fitted; layers that a trial converts, of a model with more;
# held-out tokens, and calibration tokens for refinement.
_FINALISTS = 4
_PROBED = 4
_TRIAL_HELD_OUT = 2048
_TRIAL_CALIBRATION = 8192


@dataclass(frozen=True)
class Trial:
    """A split that was tried.

    plan: the plan of the conversion with this split.
    kl: the KL in nats per token with a few layers converted, as fitted.
    refined_kl: the same after a few steps of refinement; None if not measured.
    """

    plan: Plan
    kl: float
    refined_kl: float | None = None

    @property
    def sort_key(self) -> tuple[bool, float]:
        """Lower is better. Any refined KL precedes any as fitted, and any number precedes NaN."""
        kl = self.kl if self.refined_kl is None else self.refined_kl
        return self.refined_kl is None, math.inf if math.isnan(kl) else kl

    @property
    def engines(self) -> int:
        """The number of engines that serve the split."""
        return sum(support.serves for support in self.plan.engines)

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without ``refined_kl`` if it was not measured."""
        spec = self.plan.latent
        assert spec is not None
        values = {"kv_rank": spec.kv_rank, "rope_dim": spec.rope_dim, "kl": self.kl}
        return values if self.refined_kl is None else {**values, "refined_kl": self.refined_kl}


def choose_slots_and_split(
    plan: Plan, calibration: Calibration | None, scratch: Path, stages: Stages
) -> tuple[Plan, dict[str, Any]]:
    """Choose the rotary slots of an MLA result, and the split of a budget by measured drift.

    Returns the plan with both, and entries for ``kvfold.json``. A calibrated method surveys the
    layers; otherwise the weights alone choose. Statistics for trials are in a folder in ``scratch``
    meanwhile.
    """
    if calibration is None or not plan.method.reads_text:
        return choose_slots(plan, mla_specs(plan.request, plan.model)[0], ()), {}
    folder = scratch / ".survey"
    folder.mkdir(exist_ok=True)
    try:
        saved = None if plan.request.budget is None else folder
        surveyed = survey_layers(plan, calibration, saved, stages)
        plan, splits = choose_split(plan, calibration, surveyed, folder, stages)
    finally:
        if processes.is_rank0():
            shutil.rmtree(folder)
    return plan, {"splits": splits} if splits else {}


def survey_layers(
    plan: Plan, calibration: Calibration, folder: Path | None, stages: Stages
) -> list[LayerSurvey]:
    """Survey every layer of the source over some calibration sequences. The layers' statistics are
    saved in ``folder``, if any, for trials of splits.
    """
    source = calibration.source
    count = max(processes.world_size(), math.ceil(_SURVEYED / plan.request.length))
    states = embed(source, processes.shard(calibration.tokens.calibration[:count]))
    layers: list[LayerSurvey] = []
    for index in stages.over("survey", range(source.layers), source.layers, "layer"):
        with source.open_layer(index) as layer:
            statistics, inputs = gather_statistics(source, layer, states, plan.model)
        weights = linearize_heads(source_layer(plan, index), statistics)
        rotary = layer_rotary(plan.model, index, "short")
        layers.append(rope_slots.survey_layer(weights, statistics, rotary, plan.geometry.positions))
        if processes.is_rank0() and folder is not None:
            saved = {"statistics": vars(statistics), "inputs": inputs}
            torch.save(saved, folder / f"{index}.pt")
    # Equal on all processes, to the last bit.
    return processes.broadcast_from_rank0(lambda: layers)


def choose_slots(plan: Plan, spec: MlaSpec, surveyed: Sequence[LayerSurvey]) -> Plan:
    """``plan`` with the split ``spec`` and the best rotary slots for the surveyed layers; layout
    engine allows only plain RoPE.

    Without a survey there is nothing to choose by: a uniform stride over the source's frequencies.
    """
    thetas = [survey.theta for survey in surveyed] or [
        layer_rotary(plan.model, layer, "short").theta for layer in range(plan.geometry.layers)
    ]
    rope_dim = spec.used_rope_dim(plan.geometry.rotary_dims)

    def choose(alike: list[int]) -> Slots:
        surveys = [surveyed[layer] for layer in alike] if surveyed else []
        if surveys and spec.layout == "engine":
            return rope_slots.plain_slots(surveys, rope_dim)
        if surveys:
            return rope_slots.choose_slots(surveys, rope_dim)
        # Layers that do not rotate have no frequencies to choose from.
        theta = next((thetas[layer] for layer in alike if thetas[layer].numel()), None)
        if theta is None:
            return rope_slots.NO_SLOTS
        return rope_slots.stride_slots(theta, spec.rope_dim)

    slots = rope_slots.slots_by_layer(thetas, choose)
    return plan_mla(plan.request, plan.checkpoint, plan.model, spec, slots)


def choose_split(
    plan: Plan,
    calibration: Calibration,
    surveyed: Sequence[LayerSurvey],
    folder: Path,
    stages: Stages,
) -> tuple[Plan, list[dict[str, Any]]]:
    """The plan with the best split and rotary slots for the surveyed layers, and all splits that
    were tried, as JSON values (none without a budget).
    """
    plans = [choose_slots(plan, spec, surveyed) for spec in mla_specs(plan.request, plan.model)]
    if plan.request.budget is None:
        return plans[0], []
    trials = compare_splits(plans, calibration, folder, stages)
    return prefer_served(trials).plan, [trial.to_dict() for trial in trials]


def prefer_served(trials: Sequence[Trial]) -> Trial:
    """The trial that drifts least, or one that more engines serve if its KL is at most 5 % higher.

    If some trials were refined, the choice is among them.
    """
    unrefined, kl = min(trial.sort_key for trial in trials)
    near = [trial for trial in trials if trial.sort_key <= (unrefined, _SERVED_FACTOR * kl)]
    return min(near, key=lambda trial: (-trial.engines, trial.sort_key))


def compare_splits(
    plans: Sequence[Plan], calibration: Calibration, folder: Path, stages: Stages
) -> list[Trial]:
    """Try all ``plans`` as fitted, then the best with refinement if the request refines."""
    trials = [
        Trial(plan, try_split(plan, calibration, folder))
        for plan in stages.over("splits", plans, len(plans), "split")
    ]
    if not plans[0].request.refine:
        return trials
    # Refined are the best few, and the splits that more engines serve than the best.
    ranked = sorted(trials, key=lambda trial: trial.sort_key)
    more = [trial for trial in ranked[_FINALISTS:] if trial.engines > ranked[0].engines]
    finalists = [*ranked[:_FINALISTS], *more]
    for trial in stages.over("finals", finalists, len(finalists), "split"):
        refined_kl = try_split(trial.plan, calibration, folder, _TRIAL_STEPS)
        trials[trials.index(trial)] = replace(trial, refined_kl=refined_kl)
    return trials


def try_split(plan: Plan, calibration: Calibration, folder: Path, refine: int = 0) -> float:
    """The KL on held-out text, in nats per token, with a few layers converted by ``plan`` and
    refined in ``refine`` steps.

    Statistics of the layers, ``{index}.pt`` in ``folder``, are those of the survey.
    """
    tokens = calibration.tokens
    length = tokens.calibration.shape[1]
    tokens = replace(
        tokens,
        calibration=tokens.calibration[: max(1, _TRIAL_CALIBRATION // length)],
        held_out=tokens.held_out[: max(1, _TRIAL_HELD_OUT // length)],
    )
    layers = plan.geometry.layers
    count = min(layers, _PROBED)
    probed = {(2 * number + 1) * layers // (2 * count) for number in range(count)}
    walk = open_walk(plan, replace(calibration, tokens=tokens), refine, statistics=False)
    for step in walk:
        if step.index not in probed:
            step.keep_source()
            continue
        if processes.is_rank0():
            saved = torch.load(folder / f"{step.index}.pt", weights_only=True, mmap=True)
            step.statistics = LayerStatistics(**saved["statistics"])
            step.inputs = saved["inputs"]
        tensors, _ = convert_layer(plan, step, refine)
        step.replace(tensors)
    return processes.broadcast_from_rank0(lambda: walk.measurement().kl)
