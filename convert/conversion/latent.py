"""Calibrated conversions to latent attention (MLA).

All layers share their rotary frequencies, so every layer is surveyed before any is converted. The survey's statistics
are in a scratch folder beside the shards; in memory are small tables only.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kvfold.convert import processes
from kvfold.convert.conversion.calibrated import Calibrated
from kvfold.convert.conversion.calibration import (
    hidden_states,
    load_tokens,
    own_sequences,
    print_start,
    source_stream,
)
from kvfold.convert.conversion.journal import Journal
from kvfold.convert.conversion.latent_layer import (
    DAMPERS,
    SHARE,
    Candidate,
    Survey,
    latent_layer,
    spectrum_note,
    spectrum_record,
)
from kvfold.convert.conversion.method import Converted, Method, Notes
from kvfold.convert.conversion.norms import NORMS
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.refinement import refinement_record
from kvfold.convert.conversion.source import source_heads, source_layer, source_rotary
from kvfold.convert.conversion.student_walk import StudentWalk
from kvfold.convert.conversion.trials import resolve
from kvfold.convert.progress import Stages
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.windows import CalibrationTokens
from kvfold.convert.transforms.head_norms import linear_heads
from kvfold.convert.transforms.latent import slots as rope_slots
from kvfold.convert.transforms.latent.slots import LayerSurvey
from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.weights import LayerStatistics
from kvfold.convert.walk.hidden import Keep
from kvfold.convert.walk.passes import survey
from kvfold.convert.walk.walk import Step


class Latent(Method):
    """Layers fitted to the statistics of a survey, for the split and frequencies that the survey shows to be best."""

    def __init__(self, chosen: Candidate, surveyed: Survey, choices: Notes, keep: Keep) -> None:
        super().__init__(chosen.plan)
        self._chosen, self._survey, self._choices = chosen, surveyed, choices
        self._walk = StudentWalk(chosen.plan, surveyed.source, surveyed.tokens, statistics=False, keep=keep)

    @classmethod
    @contextmanager
    def begin(cls, plan: Plan, scratch: Path, stages: Stages) -> Iterator[Self]:
        folder = scratch / ".survey"
        folder.mkdir(exist_ok=True)
        try:
            with hidden_states(plan.request.spill) as keep:
                surveyed = survey_source(plan, folder, stages, keep)
                chosen, choices = resolve(plan, surveyed, stages)
                yield cls(chosen, surveyed, choices, keep)
        finally:
            if processes.is_first():  # which alone reads it
                shutil.rmtree(folder)

    def walk_again(self, journal: Journal, stages: Stages) -> None:
        self._walk.walk_again(journal, stages)

    def layers(self, journal: Journal) -> Iterator[Converted]:
        for step in self._walk.steps():
            latent, notes = processes.from_first(partial(self._fitted, step))
            yield self._walk.convert(step, latent, notes)

    def _fitted(self, step: Step) -> tuple[LatentWeights, Notes]:
        latent, notes = latent_layer(self._chosen, step, self._survey)
        return latent, {**notes, **spectrum_note(self._chosen, step.index, self._survey)}

    def measured(self, notes: Sequence[Notes]) -> Calibrated:
        fits = {name: [note[name] for note in notes if name in note] for name in (SHARE, DAMPERS, NORMS)}
        fits = {name: values for name, values in fits.items() if values}
        fits |= spectrum_record(notes, self._chosen.target.channels)
        return self._walk.measured({**self._choices, **fits, **refinement_record(notes)})


def survey_source(plan: Plan, folder: Path, stages: Stages, keep: Keep = list) -> Survey:
    """Load calibration text and walk the source alone over it; the layers' statistics go into ``folder``."""
    tokens = load_tokens(plan, folder.parent, stages)
    source = source_stream(plan)
    print_start(plan, tokens)
    return survey_layers(plan, source, tokens, folder, stages, keep)


def survey_layers(
    plan: Plan, source: CheckpointStream, tokens: CalibrationTokens, folder: Path, stages: Stages, keep: Keep = list
) -> Survey:
    """Walk ``source`` alone over the calibration sequences; the layers' statistics go into ``folder``.

    ``keep`` says where hidden states are.
    """
    layers = []
    surveyed = survey(source, own_sequences(tokens.calibration), heads=source_heads(plan), keep=keep)
    calibrated = stages.over("survey", surveyed, plan.geometry.layers, "layer")
    for index, statistics, inputs in calibrated:
        layers.append(processes.from_first(partial(_note, plan, folder, index, statistics, inputs)))
    return Survey(source, tokens, tuple(layers), folder)


def _note(plan: Plan, folder: Path, index: int, statistics: LayerStatistics, inputs: Tensor) -> LayerSurvey:
    """Save the statistics of a layer; returns its tables."""
    weights = linear_heads(source_layer(plan, index), statistics)
    torch.save({"statistics": vars(statistics), "inputs": inputs}, folder / f"{index}.pt")
    return rope_slots.survey_layer(weights, statistics, source_rotary(plan, index), plan.geometry.positions)
