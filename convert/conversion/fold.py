"""Calibrated folds to grouped heads (GQA, MQA): principal components over text, or a pooled start to refine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from kvfold.convert import processes
from kvfold.convert.conversion.calibrated import Calibrated
from kvfold.convert.conversion.calibration import hidden_states, load_tokens, print_start, source_stream
from kvfold.convert.conversion.journal import Journal
from kvfold.convert.conversion.method import Converted, Method, Notes
from kvfold.convert.conversion.norms import NORMS, norms_note
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.pooled import pooled_layer
from kvfold.convert.conversion.refinement import refinement_record
from kvfold.convert.conversion.source import source_layer, source_rotary
from kvfold.convert.conversion.student_walk import StudentWalk
from kvfold.convert.errors import InputError
from kvfold.convert.families.layout import layer_rotary
from kvfold.convert.families.model import Model
from kvfold.convert.progress import Stages
from kvfold.convert.request import WEIGHTS_ONLY
from kvfold.convert.transforms.fold import grouping, principal
from kvfold.convert.transforms.fold.grouping import Pairs
from kvfold.convert.transforms.fold.principal import layer_moments
from kvfold.convert.transforms.sinks import judged
from kvfold.convert.transforms.weights import AttentionWeights, LayerStatistics, Rotary
from kvfold.convert.walk.walk import Step


class Fold(Method):
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
            folded, notes = processes.from_first(partial(fold_layer, self.plan, step))
            yield self._walk.convert(step, folded, notes)

    def measured(self, notes: Sequence[Notes]) -> Calibrated:
        names = [name for name in (*_notes(()), NORMS) if all(name in note for note in notes)]
        choices = {name: [note[name] for note in notes] for name in names}
        return self._walk.measured({**choices, **refinement_record(notes)})


def fold_layer(plan: Plan, step: Step, shared: dict[bool, Pairs] | None = None) -> tuple[AttentionWeights, Notes]:
    """The layer with its key/value heads folded.

    Noted are which of them share, how tokens were counted, and how much norms on queries and keys vary. ``shared``
    keeps what folds of the same layer to other numbers of heads need too.
    """
    plain = grouping.contiguous(plan.geometry.kv_heads, plan.kv_heads)
    if plan.request.resolved_method in WEIGHTS_ONLY:  # a start for refinement
        return pooled_layer(plan, step.index), _notes(plain)
    weights, statistics = source_layer(plan, step.index), step.statistics
    if statistics is None:
        raise ValueError("step: expected statistics, found none")
    rotary, context = fold_rotary(plan, step.index), fold_context(plan, step.index)
    known = {} if shared is None else shared  # by whether tokens count alike

    def pairs(counted: LayerStatistics) -> Pairs:
        alike = counted is statistics
        if alike not in known:
            known[alike] = Pairs(layer_moments(weights, counted, rotary, context))
        return known[alike]

    def error(folded: AttentionWeights) -> float:
        return step.attention_error(plan.layout.encode(step.index, folded))  # judged as the files hold it

    def fit(counted: LayerStatistics) -> grouping.Choice:
        if grouping_of(plan) == "contiguous":
            folded = principal.fold(weights, counted, rotary, plain, context)
            choice = grouping.Choice(plain, folded, {plain: error(folded)})
        else:
            choice = grouping.similar(pairs(counted), plan.kv_heads, error)
        if counted.normed is None:
            return choice
        other = principal.fold(weights, replace(counted, normed=None), rotary, choice.groups, context)
        return _better(choice, other, error(other))

    best = judged(statistics, fit, lambda choice: choice.errors[choice.groups])
    notes = _notes(best.weights.groups, best.share)
    return best.weights.weights, {**notes, **norms_note(weights, statistics)}


def _better(choice: grouping.Choice, other: AttentionWeights, error: float) -> grouping.Choice:
    """``choice``, or the same groups as ``other`` where that has the smaller error: it is exact for identical heads."""
    if error >= choice.errors[choice.groups]:
        return choice
    return replace(choice, weights=other, errors={**choice.errors, choice.groups: error})


def _notes(groups: grouping.Partition, share: float = 0.0) -> Notes:
    return {"groups": [list(group) for group in groups], "received_attention_share": share}


def fold_rotary(plan: Plan, layer: int) -> Rotary:
    """The frequencies that a fold is fitted to. They only guide the fit: the model keeps its own rotation.

    Rope types whose frequencies depend on the length of the text (dynamic) count as those of short texts.
    """
    try:
        return source_rotary(plan, layer)
    except InputError:
        model = plan.model
        kind = model.layers[layer].type
        table = {**model.rope_table(kind), "rope_type": "default"}
        tables = {kind: table} if kind in (model.family.rotary.by_type or {}) else table
        plain = Model(model.family, {**model.config, "rope_scaling": None, "rope_parameters": tables})
        return layer_rotary(plain, layer)


def fold_context(plan: Plan, layer: int) -> int:
    """The context of ``layer``: the number of positions back that it has to see."""
    window = plan.model.layers[layer].window
    return min(plan.geometry.positions, window or plan.geometry.positions)


def grouping_of(plan: Plan) -> str:
    """The request's grouping; by default ``similar`` for MHA sources (heads that share already were trained to)."""
    return plan.request.group or ("similar" if plan.geometry.kv_heads == plan.geometry.heads else "contiguous")
