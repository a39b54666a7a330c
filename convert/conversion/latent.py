"""Latent attention (MLA) in a conversion: the survey of all layers, candidates for the split, the fit of each layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.convert import processes
from kvfold.convert.conversion.calibration import held_out_error, own_sequences
from kvfold.convert.conversion.plan import Plan, latent_plan
from kvfold.convert.conversion.source import source_heads, source_layer, source_rotary
from kvfold.convert.methods.registry import Fitted, LatentLayer, Notes
from kvfold.convert.progress import Stages
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.targets.mla.config import LatentTarget, query_rank
from kvfold.convert.text.windows import CalibrationTokens
from kvfold.convert.transforms.head_norms import linear_heads
from kvfold.convert.transforms.latent import slots as rope_slots
from kvfold.convert.transforms.latent.latent import latent_spectrum
from kvfold.convert.transforms.latent.slots import LayerSurvey, Slots
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.hidden import Keep
from kvfold.convert.walk.passes import survey
from kvfold.convert.walk.walk import Step

SPECTRUM = "latent_spectrum"
# Components of the spectrum that is recorded, relative to the channels.
_SHOWN_CHANNELS = 3


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
    """A way to store the model: its plan, the rotary slots of each layer, and after trials its drift, KL in nats.

    ``kl`` is that as fitted, ``refined_kl`` that after a few steps of refinement.
    """

    plan: Plan
    target: LatentTarget
    slots: tuple[Slots, ...]
    kl: float = math.nan
    refined_kl: float | None = None

    @property
    def judged(self) -> tuple[bool, float]:
        """Lower is better: any refined KL before one as fitted."""
        return self.refined_kl is None, self.kl if self.refined_kl is None else self.refined_kl

    @property
    def served_by(self) -> list[str]:
        """The engines that serve its output."""
        return [verdict.engine for verdict in self.plan.engines if verdict.serves]


def survey_layers(
    plan: Plan, source: CheckpointStream, tokens: CalibrationTokens, folder: Path, stages: Stages, keep: Keep = list
) -> Survey:
    """Walk ``source`` alone over the calibration sequences; the layers' statistics go into ``folder``.

    ``keep`` says where hidden states are.
    """

    def note(index: int, statistics: LayerStatistics, inputs: Tensor) -> LayerSurvey:
        weights = linear_heads(source_layer(plan, index), statistics)
        torch.save({"statistics": vars(statistics), "inputs": inputs}, folder / f"{index}.pt")
        return rope_slots.survey_layer(weights, statistics, source_rotary(plan, index), plan.geometry.positions)

    surveyed = survey(source, own_sequences(tokens.calibration), heads=source_heads(plan), keep=keep)
    walked = stages.over("survey", surveyed, plan.geometry.layers, "layer")
    layers = tuple(processes.from_first(partial(note, *each)) for each in walked)
    return Survey(source, tokens, layers, folder)


def candidate(plan: Plan, target: LatentTarget, layers: Sequence[LayerSurvey]) -> Candidate:
    """``target`` with the rotary slots that suit the surveyed ``layers`` best; for engines the best of plain RoPE.

    A method that reads no text gets a uniform stride over the source's frequencies.
    """
    if plan.request.chosen_method.reads_text:
        thetas = [layer.theta for layer in layers]
        choose = rope_slots.plain_slots if target.layout == "engine" else rope_slots.choose_slots
        kept = target.rope_kept(plan.geometry.rotary_dims)
        slots = rope_slots.slots_by_layer(thetas, lambda alike: choose([layers[layer] for layer in alike], kept))
    else:
        thetas = [source_rotary(plan, layer).theta for layer in range(plan.geometry.layers)]

        def stride(alike: list[int]) -> Slots:
            # Layers that do not rotate have no frequencies to choose from.
            theta = next((thetas[layer] for layer in alike if thetas[layer].numel()), None)
            if theta is None:
                return rope_slots.NO_SLOTS
            return rope_slots.stride_slots(theta, plan.geometry.kv_heads, target.rope_dim)

        slots = rope_slots.slots_by_layer(thetas, stride)
    frequencies = [each.theta.tolist() for each in slots]
    return Candidate(latent_plan(plan.request, plan.checkpoint, plan.model, target, frequencies), target, slots)


def fitted_latent(chosen: Candidate, index: int, step: Step | None = None, surveyed: Survey | None = None) -> Fitted:
    """The layer ``index`` as latent attention. ``step`` and ``surveyed`` are None without text."""
    plan, target = chosen.plan, chosen.target
    method, rank = plan.request.chosen_method, query_rank(plan.model, chosen.target)
    weights, norms = source_layer(plan, index), plan.model.names.get(("attention_norm", index))
    statistics, inputs = None, torch.empty(0, weights.model_dim)
    if surveyed is not None and method.reads_text:
        statistics, inputs = surveyed.notes(index)

    return method.fit(
        LatentLayer(
            index=index,
            weights=weights,
            channels=target.channels,
            slots=chosen.slots[index],
            rotary=source_rotary(plan, index),
            context=plan.geometry.positions,
            scale=plan.model.layers[index].scale,
            query_channels=None if rank is None else rank - target.constant,
            centered=target.layout != "engine",
            keeps_norms=target.layout == "kvfold",
            gain=plan.checkpoint.read(norms[0]) if norms else None,
            statistics=statistics,
            inputs=inputs,
            error=held_out_error(plan, index, step),
        )
    )


def spectrum_note(chosen: Candidate, layer: int, surveyed: Survey) -> Notes:
    """The energy of the principal components of the latent, a few times as many as there are channels.

    ``lost`` is the share beyond the channels. Nothing for a layer that was not fitted to statistics.
    """
    plan, target = chosen.plan, chosen.target
    if not plan.request.chosen_method.reads_text:
        return {}
    statistics, _ = surveyed.notes(layer)
    weights = linear_heads(source_layer(plan, layer), statistics, key_constant=target.layout != "engine")
    rotary, slots, context = source_rotary(plan, layer), chosen.slots[layer], plan.geometry.positions
    shares = latent_spectrum(weights, statistics, rotary, slots, context=context, centered=target.layout != "engine")
    shown = shares[: _SHOWN_CHANNELS * target.channels].tolist()
    return {SPECTRUM: {"sorted": shown, "lost": float(shares[target.channels :].sum())}}


def spectrum_record(notes: Sequence[Notes], channels: int) -> dict[str, Any]:
    """The layers' spectra for ``kvfold.json``: the mean spectrum, and what each layer loses."""
    mean = torch.tensor([each["sorted"] for each in notes], dtype=torch.float64).mean(0)
    return {"channels": channels, "sorted": mean.tolist(), "lost": [each["lost"] for each in notes]}
