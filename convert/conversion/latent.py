"""MLA conversions: survey all layers, settle what they share, then convert them one by one.

Rotary frequencies are shared by all layers, so every layer is looked at before any is converted. What the survey finds
of a layer waits in a scratch folder beside the shards; in memory are the surveys' small tables only.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.drift.lockstep import Measurement
from kvfold.convert.conversion.fold import (
    Calibrated,
    Made,
    Write,
    canonical_layer,
    load_tokens,
    settle_layer,
    source_stream,
    tell,
)
from kvfold.convert.conversion.journal import Journal
from kvfold.convert.conversion.plan import Plan, latent_targets, settle
from kvfold.convert.conversion.refinement import Refiner, refinement_record
from kvfold.convert.families.rotary import layer_rotary
from kvfold.convert.measure.drift import report_of
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.targets.deepseek.config import LatentTarget
from kvfold.convert.text.windows import CalibrationTokens
from kvfold.convert.transforms.latent import slots as rope_slots
from kvfold.convert.transforms.latent.latent import to_latent
from kvfold.convert.transforms.latent.norm import live_norm
from kvfold.convert.transforms.latent.queries import query_latent
from kvfold.convert.transforms.latent.slots import LayerSurvey, Slots
from kvfold.convert.transforms.latent.svd import svd_latent
from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.weights import LayerStatistics, Rotary
from kvfold.convert.walk.walk import Step, Twin, Walk, estimate_seconds, survey

Progress = Callable[[int], None]
_LOOK = 20  # steps of refinement per layer by which the splits of a budget are judged


@dataclass(frozen=True)
class LayerNotes:
    """What the survey leaves of a layer: its statistics, and attention inputs of some tokens ``[n, E]``."""

    statistics: LayerStatistics
    inputs: Tensor


@dataclass(frozen=True)
class Surveyed:
    """A model that has been looked at: ``notes(layer)`` reads what was kept of a layer."""

    source: CheckpointStream
    tokens: CalibrationTokens
    surveys: tuple[LayerSurvey, ...]
    notes: Callable[[int], LayerNotes]


def rotary_of(plan: Plan, layer: int) -> Rotary:
    """Frequencies of ``layer``; those of the short range where longrope has two sets (the context is cut to it)."""
    return layer_rotary(plan.model, layer, "short")


@contextmanager
def surveyed(plan: Plan, folder: Path, progress: Progress) -> Iterator[Surveyed]:
    """Survey the source over calibration text; the notes live in ``folder`` until the block ends."""
    tokens = load_tokens(plan)
    source = source_stream(plan)
    tell(plan, tokens, estimate_seconds(source, tokens.held_out, tokens.calibration))
    scratch = folder / ".survey"
    scratch.mkdir(exist_ok=True)
    found = []
    for index, seen, inputs in survey(source, tokens.calibration):
        statistics = rope_slots.over_context(seen, plan.geometry.positions)
        found.append(rope_slots.survey(canonical_layer(plan, index), statistics, rotary_of(plan, index)))
        torch.save({"statistics": vars(statistics), "inputs": inputs}, scratch / f"{index}.pt")
        progress(1)

    def notes(layer: int) -> LayerNotes:
        kept = torch.load(scratch / f"{layer}.pt", weights_only=True, mmap=True)
        return LayerNotes(LayerStatistics(**kept["statistics"]), kept["inputs"])

    try:
        yield Surveyed(source, tokens, tuple(found), notes)
    finally:
        shutil.rmtree(scratch)


def settled(plan: Plan, found: Surveyed) -> tuple[Plan, Slots, dict[str, Any]]:
    """``plan`` with its split and frequencies decided, the slots, and what ``kvfold.json`` tells of the decision."""
    targets = latent_targets(plan.request, plan.model)
    if plan.request.resolved_method == "svd":
        plan, slots = svd_plan(plan), svd_slots(plan)
        return plan, slots, slots_record(slots)
    offers = [_offer(plan, target, found.surveys) for target in targets]
    _tell_walks(plan, len(targets))
    best, scores = 0, list[float]()
    record: dict[str, Any] = {}
    if plan.request.budget is not None:
        scores = [_score(offer, slots, found) for offer, slots in offers]
        best = min(range(len(scores)), key=scores.__getitem__)
        record["splits"] = [
            {"kv_rank": target.kv_rank, "rope_dim": target.rope_dim, "kl": score}
            for target, score in zip(targets, scores, strict=True)
        ]
    if targets[best].layout == "engine":
        other = _offer(plan, replace(targets[best], layout="deepseek"), found.surveys)
        record["deepseek_layout"] = {"kl": _score(*other, found)}
        if plan.request.refine:  # then the run's own drift is no fair comparison: it is refined to the end
            own = scores[best] if scores else _score(*offers[best], found)
            record["deepseek_layout"] |= {"steps": _LOOK, "engine_kl": own}
    return *offers[best], {**record, **slots_record(offers[best][1])}


def _tell_walks(plan: Plan, splits: int) -> None:
    """Say on stderr how many walks come before that of the conversion: the estimate is of one."""
    request = plan.request
    walks = 0 if request.budget is None else splits
    if request.layout == "engine":
        walks += 2 if request.refine and not walks else 1
    if walks and not request.quiet:
        steps = f", with at most {_LOOK} steps of refinement per layer" if request.refine else ""
        what = f"comparing {splits} splits" if request.budget is not None else "comparing layouts"
        print(f"{what}: {walks} more walks over the text kept aside{steps}", file=sys.stderr)


def _offer(plan: Plan, target: LatentTarget, surveys: tuple[LayerSurvey, ...]) -> tuple[Plan, Slots]:
    slots = slots_for(target, surveys)
    return settle(plan, target, [float(angle) for angle in slots.theta]), slots


def _score(plan: Plan, slots: Slots, found: Surveyed) -> float:
    """KL of the next-token distributions on sequences kept aside, nats, if the model were converted so."""
    return _walk(plan, found, slots, lambda tensors: None, lambda amount: None, Refiner(plan, _LOOK))[1].kl


def slots_for(target: LatentTarget, surveys: tuple[LayerSurvey, ...]) -> Slots:
    """The rotary slots of a principal conversion: the best ones, or for engines the best that plain RoPE can say."""
    choose = rope_slots.plain_slots if target.layout == "engine" else rope_slots.choose_slots
    return choose(surveys, target.rope_dim)


def latent_layer(plan: Plan, layer: int, notes: LayerNotes, slots: Slots) -> LatentWeights:
    """``layer`` as latent attention, fitted to the survey's statistics."""
    if plan.request.resolved_method == "svd":
        return svd_layer(plan, layer, slots)
    target, rotary = plan.latent_target(), rotary_of(plan, layer)
    weights, scale = canonical_layer(plan, layer), plan.model.layers[layer].scale
    latent = to_latent(weights, notes.statistics, rotary, slots, target.channels, scale=scale, centred=target.constant)
    rank = plan.query_rank()
    if rank is not None:
        latent = query_latent(latent, notes.statistics, rank - target.constant)
    return latent if target.constant else live_norm(latent, notes.inputs)


def convert_surveyed(
    plan: Plan,
    found: Surveyed,
    slots: Slots,
    choices: Mapping[str, Any],
    write: Write,
    progress: Progress,
    journal: Journal,
) -> Calibrated:
    """Convert every layer of a settled plan, give its tensors to ``write``, and measure the drift."""
    notes, measured, twin = _walk(plan, found, slots, write, progress, Refiner(plan), journal)
    drift = report_of(measured, found.source, twin.stream, found.tokens.held_out)
    return Calibrated(found.tokens, drift, {**choices, **refinement_record(notes)}, found.source)


def _walk(
    plan: Plan,
    found: Surveyed,
    slots: Slots,
    write: Write,
    progress: Progress,
    refine: Refiner,
    journal: Journal | None = None,
) -> tuple[list[Mapping[str, Any]], Measurement, Twin]:
    """Also returns what was noted about each layer."""

    def make(step: Step) -> Made:
        latent = latent_layer(plan, step.index, found.notes(step.index), slots)
        return refine(step, plan.layout.encode(step.index, latent))

    twin = Twin(found.source, plan.layout.config, plan.layout.tensors, recast=plan.request.dtype != "auto")
    calibration = found.tokens.calibration if refine.wanted else None
    walk = Walk(found.source, twin, found.tokens.held_out, calibration, keep_calibration=refine.wanted)
    notes = []
    for step in walk:
        notes.append(settle_layer(step, write, journal, make))
        progress(1)
    return notes, walk.measurement(), twin


def slots_record(slots: Slots) -> dict[str, Any]:
    """For ``kvfold.json``: how many rotary keys at each of the source's frequencies."""
    return {"rotary_slots_per_pair": list(slots.counts)}


def svd_slots(plan: Plan) -> Slots:
    """The slots of the baseline without calibration: a uniform stride over the frequencies."""
    layers = range(plan.geometry.layers)
    theta = next(rotary.theta for rotary in (rotary_of(plan, layer) for layer in layers) if rotary.dims)
    return rope_slots.stride_slots(theta, plan.geometry.kv_heads, plan.latent_target().rope_dim)


def svd_plan(plan: Plan) -> Plan:
    """``plan`` with the frequencies of the baseline."""
    return settle(plan, plan.latent_target(), [float(angle) for angle in svd_slots(plan).theta])


def svd_layers(plan: Plan, write: Callable[[Mapping[str, Tensor]], None]) -> None:
    """Convert every layer from its weights alone."""
    slots = svd_slots(plan)
    for layer in range(plan.geometry.layers):
        write(plan.layout.encode(layer, svd_layer(plan, layer, slots)))


def svd_layer(plan: Plan, layer: int, slots: Slots) -> LatentWeights:
    """``layer`` as latent attention, from its weights alone."""
    target, scale = plan.latent_target(), plan.model.layers[layer].scale
    gain = plan.checkpoint.read(plan.model.names["attention_norm", layer][0])
    latent = svd_latent(
        canonical_layer(plan, layer), rotary_of(plan, layer), slots, target.channels, scale=scale, gain=gain
    )
    rank = plan.query_rank()
    return latent if rank is None else query_latent(latent, _blank_statistics(plan), rank - target.constant)


def _blank_statistics(plan: Plan) -> LayerStatistics:
    """Inputs of which nothing is known: every direction alike."""
    width = plan.geometry.model_dim
    eye = torch.eye(width, dtype=torch.float64)
    return LayerStatistics(eye, eye.new_zeros(width), 0, eye.new_ones(plan.geometry.heads, 1))
