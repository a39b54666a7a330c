"""Convert to latent attention (MLA): survey all layers, choose the split for a budget, fit each
layer.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.convert import processes
from kvfold.convert.conversion.calibration import source_heads
from kvfold.convert.conversion.fitted import RotaryWorth, Split
from kvfold.convert.conversion.plan import Plan, latent_plan, latent_targets
from kvfold.convert.conversion.source import held_out_error, source_layer, source_rotary
from kvfold.convert.conversion.student import SPECTRUM, StudentWalk
from kvfold.convert.methods.registry import Fitted, LatentLayer
from kvfold.convert.progress import Stages
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.targets.mla.spec import MlaSpec, query_rank
from kvfold.convert.text.windows import CalibrationTokens
from kvfold.convert.transforms.head_norms import linearize_heads
from kvfold.convert.transforms.latent import slots as rope_slots
from kvfold.convert.transforms.latent.factorization import energy_shares
from kvfold.convert.transforms.latent.slots import LayerSurvey, Slots
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.hidden import Keep
from kvfold.convert.walk.passes import embed, gather
from kvfold.convert.walk.walk import Step

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
# are tried with refinement, the best as fitted; slots of the recorded spectrum, relative to those
# that are kept; layers that a trial converts, of a model with more; held-out tokens, and
# calibration tokens for refinement.
_FINALISTS = 4
_SHOWN_SLOTS = 3
_PROBED = 4
_TRIAL_HELD_OUT = 2048
_TRIAL_CALIBRATION = 8192
# Components of the spectrum that is recorded, relative to the channels.
_SHOWN_CHANNELS = 3


@dataclass(frozen=True)
class Survey:
    """The survey of a model: a small table for each layer in memory, and the folder with the
    statistics, for trials.
    """

    source: CheckpointStream
    tokens: CalibrationTokens
    layers: tuple[LayerSurvey, ...]
    folder: Path | None

    def notes(self, layer: int) -> tuple[LayerStatistics, Tensor]:
        """The statistics of ``layer`` and its attention inputs ``[n, E]`` for some of the tokens."""
        assert self.folder is not None  # trials have one
        saved = torch.load(self.folder / f"{layer}.pt", weights_only=True, mmap=True)
        return LayerStatistics(**saved["statistics"]), saved["inputs"]


@dataclass(frozen=True)
class Candidate:
    """A way to store the model: plan, rotary slots by layer and, after trials, KLs as in `Split`."""

    plan: Plan
    target: MlaSpec
    slots: tuple[Slots, ...]
    kl: float = math.nan
    refined_kl: float | None = None

    @property
    def judged(self) -> tuple[bool, float]:
        """A sort key; lower is better. Any refined KL precedes every KL as fitted, and any number
        precedes NaN.
        """
        kl = self.kl if self.refined_kl is None else self.refined_kl
        return self.refined_kl is None, math.inf if math.isnan(kl) else kl

    @property
    def split(self) -> Split:
        return Split(self.target.kv_rank, self.target.rope_dim, self.kl, self.refined_kl)

    @property
    def served_by(self) -> list[str]:
        return [verdict.engine for verdict in self.plan.engines if verdict.serves]


def survey_layers(
    plan: Plan,
    source: CheckpointStream,
    tokens: CalibrationTokens,
    folder: Path | None,
    stages: Stages,
    keep: Keep = list,
) -> Survey:
    """Walk ``source`` alone over some calibration sequences; the layers' statistics go to
    ``folder``, if any.
    """

    def note(index: int, statistics: LayerStatistics, inputs: Tensor) -> LayerSurvey:
        weights = linearize_heads(source_layer(plan, index), statistics)
        if folder is not None:
            torch.save({"statistics": vars(statistics), "inputs": inputs}, folder / f"{index}.pt")
        return rope_slots.survey_layer(
            weights, statistics, source_rotary(plan, index), plan.geometry.positions
        )

    count = max(processes.world_size(), math.ceil(_SURVEYED / plan.request.length))
    states = embed(source, processes.shard(tokens.calibration[:count]), keep)
    layers = list[LayerSurvey]()
    for index in stages.over("survey", range(source.layers), source.layers, "layer"):
        with source.open_layer(index) as layer:
            found = gather(source, layer, states, source_heads(plan))
        layers.append(processes.broadcast_from_rank0(partial(note, index, *found)))
    return Survey(source, tokens, tuple(layers), folder)


def candidate(plan: Plan, target: MlaSpec, layers: Sequence[LayerSurvey]) -> Candidate:
    """Combine ``target`` with the best slots for the surveyed ``layers``; layout engine allows only
    plain RoPE.
    """
    if plan.request.chosen_method.reads_text:
        thetas = [layer.theta for layer in layers]
        choose = rope_slots.plain_slots if target.layout == "engine" else rope_slots.choose_slots
        kept = target.used_rope_dim(plan.geometry.rotary_dims)
        slots = rope_slots.slots_by_layer(
            thetas, lambda alike: choose([layers[layer] for layer in alike], kept)
        )
    else:
        # Without text there is nothing to choose by: a uniform stride over the source's
        # frequencies.
        thetas = [source_rotary(plan, layer).theta for layer in range(plan.geometry.layers)]

        def stride(alike: list[int]) -> Slots:
            # Layers that do not rotate have no frequencies to choose from.
            theta = next((thetas[layer] for layer in alike if thetas[layer].numel()), None)
            if theta is None:
                return rope_slots.NO_SLOTS
            return rope_slots.stride_slots(theta, target.rope_dim)

        slots = rope_slots.slots_by_layer(thetas, stride)
    frequencies = [each.theta.tolist() for each in slots]
    return Candidate(
        latent_plan(plan.request, plan.checkpoint, plan.model, target, frequencies), target, slots
    )


def fitted_latent(
    chosen: Candidate,
    index: int,
    step: Step | None = None,
    surveyed: Survey | None = None,
    spectrum: bool = False,
) -> Fitted:
    """Fit layer ``index`` as latent attention. ``step`` and ``surveyed`` are None without text.

    The statistics are those of ``step``; in trials, which collect none, those of the survey.

    With ``spectrum``, a note has the energy of the latent's principal components and the share
    beyond its channels.
    """
    plan = chosen.plan
    target = chosen.target
    method = plan.request.chosen_method
    rank = query_rank(plan.model, chosen.target)
    weights = source_layer(plan, index)
    norms = plan.model.names.get(("attention_norm", index))
    slots = chosen.slots[index]
    rotary = source_rotary(plan, index)
    context = plan.geometry.positions
    centered = target.layout != "engine"
    statistics = None
    inputs = torch.empty(0, weights.model_dim)
    if (
        method.reads_text
        and step is not None
        and step.statistics is not None
        and step.inputs is not None
    ):
        statistics = step.statistics
        inputs = step.inputs
    elif method.reads_text and surveyed is not None:
        statistics, inputs = surveyed.notes(index)
    fitted = method.fit(
        LatentLayer(
            index=index,
            weights=weights,
            channels=target.channels,
            slots=slots,
            rotary=rotary,
            context=context,
            scale=plan.model.layers[index].scale,
            query_channels=None if rank is None else rank - target.constant,
            centered=centered,
            keeps_norms=target.layout == "kvfold",
            gain=plan.checkpoint.read(norms[0]) if norms else None,
            statistics=statistics,
            inputs=inputs,
            error=held_out_error(plan, index, step),
        )
    )
    if statistics is None or not spectrum:
        return fitted
    linear = linearize_heads(weights, statistics, key_constant=centered)
    shares = energy_shares(linear, statistics, rotary, slots, context=context, centered=centered)
    shown = shares[: _SHOWN_CHANNELS * target.channels].tolist()
    note = {SPECTRUM: {"sorted": shown, "lost": float(shares[target.channels :].sum())}}
    return Fitted(fitted.weights, {**fitted.notes, **note})


def choose_split(plan: Plan, surveyed: Survey, stages: Stages) -> tuple[Candidate, list[Candidate]]:
    """Choose the split and frequencies. Returns the candidate and all tried ones (empty without a
    budget).
    """
    candidates = [
        candidate(plan, target, surveyed.layers)
        for target in latent_targets(plan.request, plan.model)
    ]
    if plan.request.budget is None:
        return candidates[0], []  # the split of the request
    tried = compare_splits(candidates, surveyed, stages)
    return preferred(tried), tried


def compare_splits(
    candidates: Sequence[Candidate], surveyed: Survey, stages: Stages
) -> list[Candidate]:
    """Try all ``candidates`` as fitted, then the best with refinement if the request refines;
    returns them with KLs.
    """
    request = candidates[0].plan.request
    layers = candidates[0].plan.geometry.layers
    if not request.quiet:
        steps = (
            f"; the best are refined, at most {_TRIAL_STEPS} steps each" if request.refine else ""
        )
        trials = f"each trial converts {len(probed_layers(layers))} of {layers} layers{steps}"
        print(f"comparing {len(candidates)} splits: {trials}", file=sys.stderr)
    fitted = stages.over("splits", candidates, len(candidates), "split")
    tried = [trial(each, surveyed) for each in fitted]
    if not request.refine:
        return tried
    # Refined are the best few, and the splits that more engines serve than the best.
    by_drift = sorted(tried, key=lambda each: each.judged)
    engines = len(by_drift[0].served_by)
    more = [each for each in by_drift[_FINALISTS:] if len(each.served_by) > engines]
    finalists = [*by_drift[:_FINALISTS], *more]
    refined = [
        trial(each, surveyed, refine=True)
        for each in stages.over("finals", finalists, len(finalists), "split")
    ]
    final = {each.target: each for each in refined}
    return [final.get(each.target, each) for each in tried]


def preferred(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that drifts least, or one that more engines serve if its KL is at most 5 %
    higher.
    """
    # If some candidates were refined, the choice is among them.
    unrefined, least = min(each.judged for each in candidates)
    near = [
        each
        for each in candidates
        if each.judged[0] == unrefined and each.judged[1] <= _SERVED_FACTOR * least
    ]
    return min(near, key=lambda each: (-len(each.served_by), each.judged))


def resolve(plan: Plan, surveyed: Survey, stages: Stages) -> tuple[Candidate, dict[str, Any]]:
    """Choose the split and frequencies. Returns the candidate and the entries of ``kvfold.json`` on
    the choice.
    """
    best, tried = choose_split(plan, surveyed, stages)
    record: dict[str, Any] = {}
    if tried:
        record["splits"] = [each.split.to_dict() for each in tried]
        least = min(tried, key=lambda each: each.judged)
        if least is not best:
            gained = [engine for engine in best.served_by if engine not in least.served_by]
            other = {
                "kv_rank": least.target.kv_rank,
                "rope_dim": least.target.rope_dim,
                "kl": least.judged[1],
            }
            record["preferred_for_engines"] = {
                "engines": gained,
                "kl": best.judged[1],
                "instead_of": other,
            }
    # Stock classes have the same slots in all layers; where frequencies differ there is a list for
    # each.
    first = best.slots[0]
    if any(each is not first for each in best.slots):
        return best, {**record, "rotary_slots_per_pair": [list(each.counts) for each in best.slots]}
    record["rotary_slots_per_pair"] = list(first.counts)
    if first.counts and surveyed.layers:
        # The worth of rotation at every frequency and slot, mean over layers, and how much of it is
        # kept.
        worth = rope_slots.mean_worth(surveyed.layers)
        slots = sum(first.counts)
        kept = [float(row[:count].sum()) for row, count in zip(worth, first.counts, strict=True)]
        best_slots = (
            worth.flatten().sort(descending=True).values[: _SHOWN_SLOTS * max(1, slots)].tolist()
        )
        record["rotary_worth"] = vars(RotaryWorth(worth.sum(1).tolist(), kept, slots, best_slots))
    return best, record


def trial(option: Candidate, surveyed: Survey, *, refine: bool = False) -> Candidate:
    """Measure the drift with a few layers converted to ``option``, refined if ``refine``. Returns
    it with its KL.
    """
    probed = probed_layers(option.plan.geometry.layers)
    tokens = surveyed.tokens
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
            fitted = processes.broadcast_from_rank0(
                partial(fitted_latent, option, step.index, step, surveyed)
            )
            step.follow(walk.made(step, fitted.weights)[0])
        else:
            step.skip()
    kl = processes.broadcast_from_rank0(lambda: walk.measurement().kl)
    return replace(option, refined_kl=kl) if refine else replace(option, kl=kl)


def probed_layers(layers: int) -> set[int]:
    """The layers that trials convert: all layers of a small model, otherwise a few evenly spaced
    ones.
    """
    count = min(layers, _PROBED)
    return {(2 * place + 1) * layers // (2 * count) for place in range(count)}
