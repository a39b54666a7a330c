"""Convert the layers one after another: from weights alone, folded with text, or as latents after a
survey.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.convert import processes
from kvfold.convert.conversion.journal import Journal
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.methods.registry import (
    DEFAULT_OBJECTIVE,
    Fitted,
    FoldLayer,
    Notes,
    find_objective,
)
from kvfold.convert.progress import Stages

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.convert.conversion.student import StudentWalk
    from kvfold.convert.transforms.fold.grouping import Pairs
    from kvfold.convert.walk.walk import Step


@dataclass(frozen=True)
class Layers:
    """The layers of ``plan``, which has no open choices; ``choices`` are those that were made, for
    ``kvfold.json``.

    ``fit(layer, step)`` transforms a layer; without text, ``walk`` and ``step`` are None.
    """

    plan: Plan
    fit: "Callable[[int, Step | None], Fitted]"
    walk: "StudentWalk | None" = None
    choices: Notes = field(default_factory=dict)

    def converted(self, journal: Journal) -> "Iterator[tuple[Mapping[str, Tensor], Notes]]":
        """Yield the layers that ``journal`` does not list as finished. Raises InputError for
        non-finite weights.
        """
        if self.walk is None:
            # Each process converts the layers that it writes.
            for index in journal.pending:
                weights = self.fit(index, None).weights
                yield self.plan.layout.encode(index, weights), {}
            return
        for step in self.walk.steps:
            # Statistics are sums over all processes; one fit for all of them keeps their students
            # equal.
            fitted = processes.broadcast_from_rank0(partial(self.fit, step.index, step))
            tensors, notes = self.walk.made(step, fitted.weights)
            step.convert(tensors)
            yield tensors, {**fitted.notes, **notes}


@contextmanager
def open_layers(plan: Plan, scratch: Path, stages: Stages) -> Iterator[Layers]:
    """Open the layers of ``plan``. Temporary files in ``scratch``, the output's folder, are deleted
    after the block.
    """
    if not plan.request.calibrated and plan.latent is None:
        yield Layers(plan, partial(fitted_fold, plan))
        return
    # Here, as in `fitted_fold`: pooling heads needs no transformers, and its bytes are copied while
    # torch is imported.
    from kvfold.convert.conversion.calibration import hidden_states, load_tokens, source_stream
    from kvfold.convert.conversion.latent import (
        Survey,
        candidate,
        fitted_latent,
        resolve,
        survey_layers,
    )
    from kvfold.convert.conversion.student import StudentWalk

    if not plan.request.calibrated and plan.latent is not None:
        chosen = candidate(plan, plan.latent, ())
        yield Layers(chosen.plan, partial(fitted_latent, chosen))
        return
    tokens = load_tokens(plan, scratch, stages)
    source = source_stream(plan, scratch)
    reads = plan.request.chosen_method.reads_text
    with hidden_states(plan.request.spill) as keep:
        if plan.latent is None:
            walk = StudentWalk(plan, source, tokens, statistics=reads, keep=keep)
            yield Layers(plan, partial(fitted_fold, plan), walk)
            return
        # All layers share their rotary frequencies, so every layer is surveyed before any is
        # converted. In memory are small tables only; the statistics for trials are in files that
        # the first process alone reads.
        folder = scratch / ".survey"
        folder.mkdir(exist_ok=True)
        try:
            tried = None if plan.request.budget is None else folder
            surveyed = Survey(source, tokens, (), None)
            if reads:  # else the weights alone choose the slots
                surveyed = survey_layers(plan, source, tokens, tried, stages, keep)
            chosen, choices = resolve(plan, surveyed, stages)
            walk = StudentWalk(chosen.plan, source, tokens, statistics=reads, keep=keep)
            yield Layers(chosen.plan, partial(fitted_latent, chosen, spectrum=True), walk, choices)
        finally:
            if processes.is_rank0():
                shutil.rmtree(folder)


def fitted_fold(
    plan: Plan, index: int, step: "Step | None" = None, shared: "dict[bool, Pairs] | None" = None
) -> Fitted:
    """Fold the key/value heads of layer ``index``. Returns the weights and notes on the heads that
    share.

    ``step`` is None without text. ``shared`` caches results for folds of the same layer to other
    numbers of heads.
    """
    from kvfold.convert.conversion.source import fold_rotary, held_out_error, source_layer
    from kvfold.convert.transforms.fold.grouping import contiguous

    request = plan.request
    geometry = plan.geometry
    method = request.chosen_method
    kv_heads = request.kv_heads or 1
    window = plan.model.layers[index].window
    # Heads that share already were trained to: by default they stay with their neighbors.
    group = request.group or ("contiguous" if geometry.kv_heads < geometry.heads else "similar")
    fitted = method.fit(
        FoldLayer(
            index=index,
            weights=source_layer(plan, index),
            kv_heads=kv_heads,
            rotary=fold_rotary(plan, index),
            context=min(geometry.positions, window or geometry.positions),
            std=geometry.initializer_range,
            seed=request.seed,
            similar=group == "similar",
            objective=find_objective(request.objective or DEFAULT_OBJECTIVE)(),
            statistics=step.statistics if step is not None and method.reads_text else None,
            error=held_out_error(plan, index, step),
            shared={} if shared is None else shared,
        )
    )
    if step is None:
        return fitted
    neighbors = [list(group) for group in contiguous(geometry.kv_heads, kv_heads)]
    return Fitted(
        fitted.weights, {"groups": neighbors, "received_attention_share": 0.0, **fitted.notes}
    )
