"""Calibrated conversions to latent attention (MLA).

All layers share their rotary frequencies, so every layer is surveyed before any is converted. The survey's statistics
are in a scratch folder beside the shards; in memory are small tables only.
"""

import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from kvfold.convert.conversion.journal import Journal
from kvfold.convert.conversion.method import Converted, Method, Notes
from kvfold.convert.conversion.plan import Plan, latent_targets, resolved
from kvfold.convert.conversion.refinement import refinement_record
from kvfold.convert.conversion.source import source_layer, source_rotary
from kvfold.convert.conversion.stages import Stages
from kvfold.convert.conversion.steps import Calibrated, StudentWalk, load_tokens, print_start, source_stream
from kvfold.convert.conversion.svd import svd_layer, svd_plan, svd_slots
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.targets.mla.config import LatentTarget
from kvfold.convert.text.windows import CalibrationTokens
from kvfold.convert.transforms.latent import slots as rope_slots
from kvfold.convert.transforms.latent.damper import with_damper
from kvfold.convert.transforms.latent.latent import to_latent
from kvfold.convert.transforms.latent.norm import live_norm
from kvfold.convert.transforms.latent.queries import query_latent
from kvfold.convert.transforms.latent.slots import LayerSurvey, Slots
from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.sinks import judged
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.walk import Step, estimate_seconds, survey

# 5 takes the split 12 + 4 of a budget of 16, +0.4510 nats per token after refinement; 20 takes 8 + 8, +0.4172
# (the model that ships, by recipes/benchmarks/bench_refine_constants.py)
_TRIAL_STEPS = 20  # of refinement per layer, where splits or layouts are compared
_WITH_KERNELS = 1.05  # KL that a split that engines serve may have, relative to the best: a choice, not a measurement
_FINALISTS = 4  # splits that are tried with refinement, the best as fitted
_PROBED = 4  # layers that a trial converts, of a model with more
_TRIAL_HELD_OUT = 2048  # tokens
_TRIAL_CALIBRATION = 8192  # tokens, for refinement

_SHARE, _DAMPERS = "received_attention_share", "damper_channels"


@dataclass(frozen=True)
class Survey:
    """A surveyed model: the tables of its layers, and the folder that holds what does not fit into memory."""

    source: CheckpointStream
    tokens: CalibrationTokens
    layers: tuple[LayerSurvey, ...]
    folder: Path

    def notes(self, layer: int) -> tuple[LayerStatistics, Tensor]:
        """The statistics of ``layer``, and its attention's inputs for some tokens ``[n, E]``."""
        saved = torch.load(self.folder / f"{layer}.pt", weights_only=True, mmap=True)
        return LayerStatistics(**saved["statistics"]), saved["inputs"]


@dataclass(frozen=True)
class Candidate:
    """A way to store the model: its plan, its rotary slots, and after a trial its drift, KL in nats.

    ``kl`` is that as fitted, ``refined_kl`` that after a few steps of refinement.
    """

    plan: Plan
    slots: Slots
    kl: float = math.nan
    refined_kl: float = math.nan

    @property
    def refined(self) -> bool:
        return not math.isnan(self.refined_kl)

    @property
    def drift(self) -> float:
        """The KL by which it is judged: refined where it was."""
        return self.refined_kl if self.refined else self.kl

    @property
    def judged(self) -> tuple[bool, float]:
        """Lower is better: any refined drift before one as fitted."""
        return not self.refined, self.drift

    @property
    def target(self) -> LatentTarget:
        return self.plan.latent_target()


class Latent(Method):
    """Layers fitted to the statistics of a survey, for the split and frequencies that the survey shows to be best."""

    def __init__(self, chosen: Candidate, surveyed: Survey, choices: Notes) -> None:
        super().__init__(chosen.plan)
        self._chosen, self._survey, self._choices = chosen, surveyed, choices
        self._walk = StudentWalk(chosen.plan, surveyed.source, surveyed.tokens, statistics=False)

    @classmethod
    @contextmanager
    def begin(cls, plan: Plan, scratch: Path, stages: Stages) -> Iterator[Self]:
        folder = scratch / ".survey"
        folder.mkdir(exist_ok=True)
        try:
            surveyed = survey_source(plan, folder, stages)
            chosen, choices = resolve(plan, surveyed, stages)
            yield cls(chosen, surveyed, choices)
        finally:
            shutil.rmtree(folder)

    def layers(self, journal: Journal) -> Iterator[Converted]:
        for step in self._walk.steps(journal):
            latent, notes = latent_layer(self._chosen, step, self._survey)
            yield self._walk.convert(step, latent, notes)

    def measured(self, notes: Sequence[Notes]) -> Calibrated:
        fits = {name: [note[name] for note in notes if name in note] for name in (_SHARE, _DAMPERS)}
        fits = {name: values for name, values in fits.items() if values}
        return self._walk.measured({**self._choices, **fits, **refinement_record(notes)})


def survey_source(plan: Plan, folder: Path, stages: Stages) -> Survey:
    """Walk the source alone over calibration text; the layers' statistics go into ``folder``."""
    tokens = load_tokens(plan, folder.parent, stages)
    source = source_stream(plan)
    print_start(plan, tokens, estimate_seconds(source, tokens.held_out, tokens.calibration, passes=3))
    layers = []
    calibrated = stages.over("survey", survey(source, tokens.calibration), plan.geometry.layers, "layer")
    for index, statistics, inputs in calibrated:
        weights, rotary = source_layer(plan, index), source_rotary(plan, index)
        layers.append(rope_slots.survey_layer(weights, statistics, rotary, plan.geometry.positions))
        torch.save({"statistics": vars(statistics), "inputs": inputs}, folder / f"{index}.pt")
    return Survey(source, tokens, tuple(layers), folder)


def resolve(plan: Plan, surveyed: Survey, stages: Stages) -> tuple[Candidate, dict[str, Any]]:
    """The split and frequencies to convert to, and what ``kvfold.json`` says of the choice.

    A budget leaves several splits: each is tried, and ``preferred`` takes one.
    """
    targets = latent_targets(plan.request, plan.model)
    candidates = [candidate(plan, target, surveyed.layers) for target in targets]
    record: dict[str, Any] = {}
    if plan.request.budget is not None:
        candidates = compare_splits(candidates, surveyed, stages)
        record["splits"] = [split_record(each) for each in candidates]
    best = preferred(candidates)
    if (least := min(candidates, key=lambda each: each.judged)) is not best:
        record["preferred_for_kernels"] = {"kl": best.drift, "instead_of": {**_split(least), "kl": least.drift}}
    if best.target.layout == "engine":
        record["free_layout"] = _against_free(best, surveyed, stages)
    return best, {**record, "rotary_slots_per_pair": list(best.slots.counts)}


def _split(each: Candidate) -> dict[str, Any]:
    return {"kv_rank": each.target.kv_rank, "rope_dim": each.target.rope_dim}


def preferred(candidates: Sequence[Candidate]) -> Candidate:
    """The split that drifts least, or one that kernels are written for where its KL is at most 5 % higher.

    Where some were refined, one of those.
    """
    least = min(candidates, key=lambda each: each.judged)
    equal = [each for each in candidates if each.refined == least.refined]
    served = [each for each in equal if each.target.has_kernels and each.drift <= _WITH_KERNELS * least.drift]
    return min(served or equal, key=lambda each: each.drift)


def compare_splits(candidates: Sequence[Candidate], surveyed: Survey, stages: Stages) -> list[Candidate]:
    """``candidates`` after trials: all of them as fitted; then, where layers are refined, the best few once more."""
    request = candidates[0].plan.request
    _print_trials(candidates[0].plan, f"comparing {len(candidates)} splits")
    fitted = stages.over("splits", candidates, len(candidates), "split")
    tried = [trial(each, surveyed) for each in fitted]
    if not request.refine:
        return tried
    by_drift = sorted(tried, key=lambda each: each.drift)
    finalists = [each for place, each in enumerate(by_drift) if place < _FINALISTS or each.target.has_kernels]
    refined = [trial(each, surveyed, refine=True) for each in stages.over("finals", finalists, len(finalists), "split")]
    final = {each.target: each for each in refined}
    return [final.get(each.target, each) for each in tried]


def split_record(tried: Candidate) -> dict[str, Any]:
    """A split's entry of ``kvfold.json``."""
    return {**_split(tried), "kl": tried.kl, **({"refined_kl": tried.refined_kl} if tried.refined else {})}


def candidate(plan: Plan, target: LatentTarget, layers: Sequence[LayerSurvey]) -> Candidate:
    """``target`` with the rotary slots that suit it best.

    Those of the baseline for svd; for engines the best that plain RoPE can express.
    """
    if plan.request.resolved_method == "svd":
        return Candidate(svd_plan(plan), svd_slots(plan))
    choose = rope_slots.plain_slots if target.layout == "engine" else rope_slots.choose_slots
    slots = choose(layers, target.rope_kept(plan.geometry.rotary_dims))
    return Candidate(resolved(plan, target, [float(angle) for angle in slots.theta]), slots)


def trial(option: Candidate, surveyed: Survey, *, refine: bool = False) -> Candidate:
    """``option`` with the drift of the model when a few of its layers are converted to it.

    With ``refine`` after a few steps of refinement of each.
    """
    probed = probed_layers(option.plan.geometry.layers)
    tokens, steps = few(surveyed.tokens), _TRIAL_STEPS if refine else 0
    walk = StudentWalk(option.plan, surveyed.source, tokens, statistics=False, trial_steps=steps)
    for step in walk.steps():
        if step.index in probed:
            walk.convert(step, latent_layer(option, step, surveyed)[0])
        else:
            step.keep()
    kl = walk.kl()
    return replace(option, refined_kl=kl) if refine else replace(option, kl=kl)


def probed_layers(layers: int) -> set[int]:
    """The layers that trials convert: all of a model with few of them, else ``_PROBED`` evenly spaced."""
    count = min(layers, _PROBED)
    return {(2 * place + 1) * layers // (2 * count) for place in range(count)}


def few(tokens: CalibrationTokens) -> CalibrationTokens:
    """The part of the sequences that trials use."""
    length = tokens.calibration.shape[1]
    held_out = tokens.held_out[: max(1, _TRIAL_HELD_OUT // length)]
    return replace(tokens, calibration=tokens.calibration[: max(1, _TRIAL_CALIBRATION // length)], held_out=held_out)


def latent_layer(chosen: Candidate, step: Step, surveyed: Survey) -> tuple[LatentWeights, Notes]:
    """The layer as latent attention, fitted to the survey's statistics; noted are how tokens counted, and dampers.

    Held-out sequences decide both.
    """
    plan, layer, target = chosen.plan, step.index, chosen.target
    if plan.request.resolved_method == "svd":  # a start for refinement
        return svd_layer(plan, layer, chosen.slots), {}
    statistics, inputs = surveyed.notes(layer)

    def error(option: tuple[LatentWeights, int]) -> float:
        return step.attention_error(plan.layout.encode(layer, option[0]))

    def fit(counted: LayerStatistics) -> tuple[LatentWeights, int]:
        if target.constant:
            return fitted_layer(chosen, layer, counted), 0
        plain = live_norm(fitted_layer(chosen, layer, counted), inputs), 0
        if counted is statistics or target.channels < 2:  # no sinks, nothing to damp
            return plain
        damped = with_damper(fitted_layer(chosen, layer, counted, target.channels - 1), statistics)
        return min(plain, (live_norm(damped, inputs), 1), key=error)

    best = judged(statistics, fit, error)
    latent, dampers = best.weights
    return latent, {_SHARE: best.share, **({} if target.constant else {_DAMPERS: dampers})}


def fitted_layer(
    chosen: Candidate, layer: int, statistics: LayerStatistics, channels: int | None = None
) -> LatentWeights:
    """``layer`` as latent attention before any norm, with ``channels`` of the latent (the target's unless given)."""
    plan, target, rank = chosen.plan, chosen.target, chosen.plan.query_rank()
    latent = to_latent(
        source_layer(plan, layer),
        statistics,
        source_rotary(plan, layer),
        chosen.slots,
        target.channels if channels is None else channels,
        context=plan.geometry.positions,
        scale=plan.model.layers[layer].scale,
        centered=target.constant,
    )
    return latent if rank is None else query_latent(latent, statistics, rank - target.constant)


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
