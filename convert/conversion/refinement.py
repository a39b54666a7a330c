"""Refinement in a conversion: the request's options, progress on stderr, and the record."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from tqdm import tqdm

from kvfold.convert.conversion.plan import Plan
from kvfold.convert.progress import stage
from kvfold.convert.training.refine import AUTO_STEPS, MIN_GAIN, ROUND, Refined, Refinement, refine_layer
from kvfold.convert.walk.output_fit import AttentionUpdate
from kvfold.convert.walk.walk import Step

OUTPUT_FIT = "output_fit"
_NOTE = "refinement"


class Refiner:
    """Refines the layers of a run whose request says so; passes the others through.

    ``steps`` replaces the request's, for a short trial; with 0 nothing is refined.
    """

    def __init__(self, plan: Plan, steps: int | None = None) -> None:
        requested = plan.request.refine
        self._display = _Display(plan.geometry.layers, requested, quiet=plan.request.quiet or steps is not None)
        made = requested if steps is None else steps
        self._task = refinement(plan, made, self._display) if requested and made else None

    @property
    def enabled(self) -> bool:
        """Whether layers are refined: the walk must keep its calibration sequences then."""
        return self._task is not None

    def __call__(self, step: Step, tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """The ``tensors`` of a layer, refined or as they are, and its notes."""
        if self._task is None:
            return tensors, {}
        refined = refine_layer(step, tensors, self._task)
        self._display.end(step.index, refined)
        return refined.tensors, {_NOTE: refined.record()}


def refinement_record(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For ``kvfold.json``, from the notes of all layers: each one's errors before and after a fit or refinement."""
    records = {name: [note[name] for note in notes if name in note] for name in (OUTPUT_FIT, _NOTE)}
    return {name: values for name, values in records.items() if values}


def refinement(plan: Plan, steps: int | str, display: "_Display") -> Refinement:
    """The task for ``plan``: the norms and scales around its attention, and the constants that must not move."""
    update = attention_update(plan)
    if plan.request.to != "mla" or plan.layout.code is not None:
        return Refinement(steps, plan.request.seed, update, update, progress=display)
    constant = plan.latent_target().constant
    return Refinement(steps, plan.request.seed, update, constant=constant, progress=display)


def attention_update(plan: Plan) -> AttentionUpdate:
    """How the layers of ``plan`` add their attention to the residual."""
    norms = plan.model.names.get(("attention_post_norm", 0))
    norm = None if norms is None else norms[0].split(".0.", 1)[1].removesuffix(".weight")
    return AttentionUpdate(plan.model.block.residual_scale, norm)


class _Display:
    """Progress on stderr: a stage for every layer, and a line with the error of each that is finished."""

    def __init__(self, layers: int, steps: int | str, *, quiet: bool) -> None:
        self._layers, self._quiet = layers, quiet
        self._total = AUTO_STEPS if steps == "auto" else int(steps)
        self._stage = ExitStack()
        self._advance: Callable[[int], None] | None = None
        self._step = 0
        if steps == "auto" and not quiet:
            print(
                f"refining: each layer until its error falls by less than {100 * MIN_GAIN:g} % in {ROUND} steps, "
                f"{AUTO_STEPS} at most",
                file=sys.stderr,
            )

    def __call__(self, layer: int, step: int, error: float) -> None:
        if self._quiet:
            return
        if self._advance is None:
            self._advance, self._step = self._stage.enter_context(stage("refining", self._total, "step")), 0
        self._advance(step - self._step)
        self._step = step

    def end(self, layer: int, refined: Refined) -> None:
        self._stage.close()
        self._advance = None
        if not self._quiet:
            outcome = (
                f"step {refined.kept} of {refined.steps}" if refined.kept else f"unchanged after {refined.steps} steps"
            )
            errors = f"{refined.before:.5f} -> {refined.after:.5f}"
            tqdm.write(f"refined layer {layer + 1}/{self._layers}: error {errors} ({outcome})", file=sys.stderr)
