"""One layer as latent attention, fitted to the statistics of a survey."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvfold.convert.conversion.method import Notes
from kvfold.convert.conversion.norms import norms_note
from kvfold.convert.conversion.plan import Plan, resolved
from kvfold.convert.conversion.source import source_layer, source_rotary
from kvfold.convert.conversion.svd import svd_layer, svd_plan, svd_slots
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.targets.mla.config import LatentTarget
from kvfold.convert.text.windows import CalibrationTokens
from kvfold.convert.transforms.head_norms import has_norms, linear_heads
from kvfold.convert.transforms.latent import slots as rope_slots
from kvfold.convert.transforms.latent.latent import latent_spectrum, to_latent
from kvfold.convert.transforms.latent.norm import live_norm
from kvfold.convert.transforms.latent.normed import to_normed_latent
from kvfold.convert.transforms.latent.queries import query_latent
from kvfold.convert.transforms.latent.slots import LayerSurvey, Slots
from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.sinks import judged, with_damper
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics
from kvfold.convert.walk.walk import Step

SHARE, DAMPERS, SPECTRUM = "received_attention_share", "damper_channels", "latent_spectrum"
_SHOWN_CHANNELS = 3  # of the spectrum that is recorded, relative to the channels


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
    """A way to store the model: its plan, the rotary slots of each layer, and after a trial its drift, KL in nats.

    ``kl`` is that as fitted, ``refined_kl`` that after a few steps of refinement.
    """

    plan: Plan
    slots: tuple[Slots, ...]
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

    @property
    def served_by(self) -> tuple[str, ...]:
        """The engines that serve its output."""
        return tuple(verdict.engine for verdict in self.plan.engines if verdict.serves)


def candidate(plan: Plan, target: LatentTarget, layers: Sequence[LayerSurvey]) -> Candidate:
    """``target`` with the rotary slots that suit it best.

    Those of the baseline for svd; for engines the best that plain RoPE can express.
    """
    if plan.request.resolved_method == "svd":
        return Candidate(svd_plan(plan), svd_slots(plan))
    choose = rope_slots.plain_slots if target.layout == "engine" else rope_slots.choose_slots
    kept = target.rope_kept(plan.geometry.rotary_dims)
    thetas = [layer.theta for layer in layers]
    slots = rope_slots.slots_by_layer(thetas, lambda alike: choose([layers[layer] for layer in alike], kept))
    return Candidate(resolved(plan, target, [each.theta.tolist() for each in slots]), slots)


def latent_layer(chosen: Candidate, step: Step, surveyed: Survey) -> tuple[LatentWeights, Notes]:
    """The layer as latent attention, fitted to the survey's statistics.

    Noted are how tokens counted, and dampers, both decided by held-out sequences, and what norms on queries and keys
    cost.
    """
    plan, layer, target = chosen.plan, step.index, chosen.target
    if plan.request.resolved_method == "svd":  # a start for refinement
        return svd_layer(plan, layer, chosen.slots[layer]), {}
    statistics, inputs = surveyed.notes(layer)
    weights = source_layer(plan, layer)

    def error(option: tuple[LatentWeights, int]) -> float:
        return step.attention_error(plan.layout.encode(layer, option[0]))

    def fit(counted: LayerStatistics) -> tuple[LatentWeights, int]:
        if target.centered:
            return fitted_layer(chosen, layer, weights, counted), 0
        plain = live_norm(fitted_layer(chosen, layer, weights, counted), inputs), 0
        if counted is statistics or target.channels < 2:  # no sinks, nothing to damp
            return plain
        damped = with_damper(fitted_layer(chosen, layer, weights, counted, target.channels - 1), statistics)
        return min(plain, (live_norm(damped, inputs), 1), key=error)

    best = judged(statistics, fit, error)
    latent, dampers = best.weights
    notes = {SHARE: best.share, **({} if target.centered else {DAMPERS: dampers})}
    lost = {} if target.keeps_norms else norms_note(weights, statistics, key_constant=target.centered)
    return latent, {**notes, **lost}


def spectrum_note(chosen: Candidate, layer: int, surveyed: Survey) -> Notes:
    """How much energy each principal component of the latent has, a few times as many as there are channels.

    ``lost`` is the share of those beyond the channels. Nothing for a layer that was not fitted to statistics.
    """
    plan, target = chosen.plan, chosen.target
    if plan.request.resolved_method == "svd":
        return {}
    statistics, _ = surveyed.notes(layer)
    weights = linear_heads(source_layer(plan, layer), statistics, key_constant=target.centered)
    rotary, slots, context = source_rotary(plan, layer), chosen.slots[layer], plan.geometry.positions
    shares = latent_spectrum(weights, statistics, rotary, slots, context=context, centered=target.centered)
    shown = shares[: _SHOWN_CHANNELS * target.channels].tolist()
    return {SPECTRUM: {"sorted": shown, "lost": float(shares[target.channels :].sum())}}


def spectrum_record(notes: Sequence[Notes], channels: int) -> Notes:
    """The layers' notes for ``kvfold.json``: the mean spectrum, and what each layer loses."""
    found = [note[SPECTRUM] for note in notes if SPECTRUM in note]
    if not found or len(found) < len(notes):
        return {}
    mean = torch.tensor([each["sorted"] for each in found], dtype=torch.float64).mean(0)
    return {SPECTRUM: {"channels": channels, "sorted": mean.tolist(), "lost": [each["lost"] for each in found]}}


def sketched_layer(chosen: Candidate, layer: int, surveyed: Survey) -> LatentWeights:
    """The layer as latent attention, nearly as good as ``latent_layer`` makes it and several times as fast.

    All tokens count alike, and least squares alternate once: 6 % more loss than after four rounds (``als.ROUNDS``).
    """
    statistics, inputs = surveyed.notes(layer)
    weights = source_layer(chosen.plan, layer)
    latent = fitted_layer(chosen, layer, weights, statistics, rounds=1)
    return latent if chosen.target.centered else live_norm(latent, inputs)


def fitted_layer(
    chosen: Candidate,
    layer: int,
    weights: AttentionWeights,
    statistics: LayerStatistics,
    channels: int | None = None,
    rounds: int | None = None,
) -> LatentWeights:
    """``weights``, those of ``layer``, as latent attention before any norm of the latent.

    Norms on queries and keys stay where the layout has a place for them; else linear maps stand in. ``channels`` of the
    latent are the target's unless given, ``rounds`` those of ``to_latent``.
    """
    plan, target, rank = chosen.plan, chosen.target, chosen.plan.query_rank()
    rotary, slots, context = source_rotary(plan, layer), chosen.slots[layer], plan.geometry.positions
    scale, channels = plan.model.layers[layer].scale, target.channels if channels is None else channels
    if target.keeps_norms and has_norms(weights):
        return to_normed_latent(
            weights, statistics, rotary, slots, channels, context=context, scale=scale, rounds=rounds
        )
    linear, centered = linear_heads(weights, statistics, key_constant=target.centered), target.centered
    latent = to_latent(
        linear, statistics, rotary, slots, channels, context=context, scale=scale, centered=centered, rounds=rounds
    )
    return latent if rank is None else query_latent(latent, statistics, rank - target.constant)
