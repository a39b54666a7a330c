"""The layers of a conversion, one after the other: from weights alone, folded over text, or as latents of a survey.

`makers` run a registered method on every layer. A method sees one layer at a time (`methods/registry.py`); a maker
reads the source, walks the student past each layer, and tells what was measured at the end.
"""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from kvfold.convert import processes
from kvfold.convert.conversion.calibration import hidden_states, load_tokens, print_start, source_stream
from kvfold.convert.conversion.journal import Journal
from kvfold.convert.conversion.latent import (
    SPECTRUM,
    Candidate,
    Survey,
    candidate,
    fitted_latent,
    spectrum_note,
    spectrum_record,
    survey_source,
)
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.source import fold_context, fold_rotary, source_layer
from kvfold.convert.conversion.splits import resolve
from kvfold.convert.conversion.student import Calibrated, Converted, StudentWalk
from kvfold.convert.methods.registry import DEFAULT_OBJECTIVE, Fitted, FoldLayer, Notes, find_objective
from kvfold.convert.progress import Stages
from kvfold.convert.request import ConvertRequest
from kvfold.convert.transforms.fold.grouping import Pairs, contiguous
from kvfold.convert.transforms.weights import AttentionWeights
from kvfold.convert.walk.hidden import Keep
from kvfold.convert.walk.walk import Step


class Maker(ABC):
    """Makes the layers of one plan::

        with maker_of(request).begin(plan, scratch, stages) as maker:
            maker.walk_again(journal, stages)
            for layer in maker.layers(journal):
                ...                                 # write layer.tensors, note layer.notes
            measured = maker.measured(journal.notes)

    ``plan`` is the request's, with everything resolved that it left open (the split of a budget, MLA's frequencies).
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @classmethod
    @contextmanager
    @abstractmethod
    def begin(cls, plan: Plan, scratch: Path, stages: Stages) -> Iterator[Self]:
        """Resolve ``plan``. Temporary files go into ``scratch``, the output's folder, and are gone when the block ends.

        Raises InputError when the model cannot be calibrated.
        """
        yield cls(plan)

    @abstractmethod
    def layers(self, journal: Journal) -> Iterator[Converted]:
        """The layers in order, without those that ``journal`` has finished. InputError for non-finite weights."""

    def walk_again(self, journal: Journal, stages: Stages) -> None:  # noqa: B027  # without text there is no walk
        """Before `layers`: take the text past the layers that ``journal`` has finished."""

    def measured(self, notes: Sequence[Notes]) -> Calibrated | None:
        """After the last layer: the measurements, None without text. ``notes`` are those of all layers."""
        return None


def maker_of(request: ConvertRequest) -> type[Maker]:
    """What makes the layers of ``request``."""
    if not request.calibrated:
        return FromWeights
    return Latents if request.to == "mla" else Folds


class FromWeights(Maker):
    """Layers from weights alone. Each process makes those that it writes."""

    def __init__(self, plan: Plan, chosen: Candidate | None) -> None:
        super().__init__(plan if chosen is None else chosen.plan)
        self._chosen = chosen

    @classmethod
    @contextmanager
    def begin(cls, plan: Plan, scratch: Path, stages: Stages) -> Iterator[Self]:
        yield cls(plan, None if plan.latent is None else candidate(plan, plan.latent, ()))

    def layers(self, journal: Journal) -> Iterator[Converted]:
        for index in journal.pending:
            fitted = fitted_fold(self.plan, index) if self._chosen is None else fitted_latent(self._chosen, index)
            yield Converted(index, self.plan.layout.encode(index, fitted.weights), {})


class Folds(Maker):
    """Key/value heads folded layer by layer, each fitted to the statistics of its inputs on calibration text."""

    def __init__(self, plan: Plan, walk: StudentWalk) -> None:
        super().__init__(plan)
        self._walk = walk

    @classmethod
    @contextmanager
    def begin(cls, plan: Plan, scratch: Path, stages: Stages) -> Iterator[Self]:
        tokens = load_tokens(plan, scratch, stages)
        source = source_stream(plan)
        print_start(plan, tokens)
        with hidden_states(plan.request.spill) as keep:
            yield cls(plan, StudentWalk(plan, source, tokens, statistics=True, keep=keep))

    def walk_again(self, journal: Journal, stages: Stages) -> None:
        self._walk.walk_again(journal, stages)

    def layers(self, journal: Journal) -> Iterator[Converted]:
        for step in self._walk.steps():
            fitted = processes.from_first(partial(fitted_fold, self.plan, step.index, step))
            yield self._walk.convert(step, fitted.weights, fitted.notes)

    def measured(self, notes: Sequence[Notes]) -> Calibrated:
        return self._walk.measured(_by_name(notes))


class Latents(Maker):
    """Layers fitted to the statistics of a survey, for the split and frequencies that the survey shows to be best.

    All layers share their rotary frequencies, so every layer is surveyed before any is converted. The survey's
    statistics are in a scratch folder beside the shards; in memory are small tables only.
    """

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
            fitted = processes.from_first(partial(self._fitted, step))
            yield self._walk.convert(step, fitted.weights, fitted.notes)

    def _fitted(self, step: Step) -> Fitted:
        fitted = fitted_latent(self._chosen, step.index, step, self._survey)
        return Fitted(fitted.weights, {**fitted.notes, **spectrum_note(self._chosen, step.index, self._survey)})

    def measured(self, notes: Sequence[Notes]) -> Calibrated:
        made: dict[str, Any] = dict(_by_name(notes))
        if SPECTRUM in made:
            made[SPECTRUM] = spectrum_record(made[SPECTRUM], self._chosen.target.channels)
        return self._walk.measured({**self._choices, **made})


def _by_name(notes: Sequence[Notes]) -> dict[str, list[Any]]:
    """The notes of all layers by name, for ``kvfold.json``; layers without a name are left out of its list."""
    names = dict.fromkeys(name for each in notes for name in each)
    return {name: [each[name] for each in notes if name in each] for name in names}


def fitted_fold(plan: Plan, index: int, step: Step | None = None, shared: dict[bool, Pairs] | None = None) -> Fitted:
    """The layer ``index`` with its key/value heads folded, and notes on which of them share.

    ``step`` is the layer of a walk, None without text. ``shared`` keeps what folds of the same layer to other numbers
    of heads need too.
    """
    request = plan.request
    method = request.chosen_method
    layer = FoldLayer(
        index=index,
        weights=source_layer(plan, index),
        kv_heads=plan.kv_heads,
        rotary=fold_rotary(plan, index),
        context=fold_context(plan, index),
        std=plan.geometry.initializer_range,
        seed=request.seed,
        similar=plan.grouping == "similar",
        objective=find_objective(request.objective or DEFAULT_OBJECTIVE)(),
        statistics=step.statistics if step is not None and method.reads_text else None,
        error=_judge(plan, step),
        shared={} if shared is None else shared,
    )
    fitted = method.fit(layer)
    if step is None:
        return fitted
    neighbors = [list(group) for group in contiguous(plan.geometry.kv_heads, plan.kv_heads)]
    return Fitted(fitted.weights, {"groups": neighbors, "received_attention_share": 0.0, **fitted.notes})


def _judge(plan: Plan, step: Step | None) -> Callable[[AttentionWeights], float]:
    """The error of a candidate as the files will hold it."""

    def error(folded: AttentionWeights) -> float:
        if step is None:
            raise ValueError("layer: no text to measure an error on; register the method with reads_text=True")
        return step.attention_error(plan.layout.encode(step.index, folded))

    return error
