"""Refinement in a conversion: the request's options, progress on stderr, and the record."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from tqdm import tqdm

from kvfold.convert.conversion.plan import Plan
from kvfold.convert.progress import Stages
from kvfold.convert.training.refine import AUTO_STEPS, MIN_GAIN, ROUND, Refined, Refinement, refine_layer
from kvfold.convert.walk.output_fit import AttentionUpdate
from kvfold.convert.walk.walk import Step

OUTPUT_FIT = "output_fit"
_NOTE = "refinement"


class Refiner:
    """Refines the layers of a run whose request says so; passes the others through.

    ``steps`` replaces the request's, for a short trial, which prints nothing; with 0 nothing is refined.
    """

    def __init__(self, plan: Plan, steps: int | None = None) -> None:
        requested = plan.request.refine
        made = requested if steps is None else steps
        self._task = refinement(plan, made) if requested and made else None
        self._layers, self._quiet = plan.geometry.layers, plan.request.quiet or steps is not None
        self._stages = Stages(quiet=self._quiet)
        if requested == "auto" and not self._quiet:
            print(
                f"refining: each layer until its error falls by less than {100 * MIN_GAIN:g} % in {ROUND} steps, "
                f"{AUTO_STEPS} at most",
                file=sys.stderr,
            )

    @property
    def enabled(self) -> bool:
        """True if layers are refined: the walk must keep its calibration sequences then."""
        return self._task is not None

    def __call__(self, step: Step, tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """The ``tensors`` of a layer, refined or as they are, and its notes."""
        if self._task is None:
            return tensors, {}
        done, total = 0, AUTO_STEPS if self._task.steps == "auto" else int(self._task.steps)
        with self._stages("refining", total, "step") as advance:

            def progress(steps: int, error: float) -> None:
                nonlocal done
                advance(steps - done)
                done = steps

            refined = refine_layer(step, tensors, self._task, progress)
        if not self._quiet:
            self._print(step.index, refined)
        return refined.tensors, {_NOTE: refined.record()}

    def _print(self, layer: int, refined: Refined) -> None:
        outcome = f"unchanged after {refined.steps} steps"
        if refined.kept:
            outcome = f"step {refined.kept} of {refined.steps}"
        errors = f"{refined.before:.5f} -> {refined.after:.5f}"
        tqdm.write(f"refined layer {layer + 1}/{self._layers}: error {errors} ({outcome})", file=sys.stderr)


def refinement_record(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For ``kvfold.json``, from the notes of all layers: each one's errors before and after a fit or refinement."""
    records = {name: [note[name] for note in notes if name in note] for name in (OUTPUT_FIT, _NOTE)}
    return {name: values for name, values in records.items() if values}


def refinement(plan: Plan, steps: int | str) -> Refinement:
    """The task for ``plan``: the norms and scales around its attention, and the constants that must not move."""
    update = attention_update(plan)
    if plan.request.to != "mla" or plan.layout.code is not None:
        return Refinement(steps, plan.request.seed, update, update)
    # DeepSeek's layers add their attention as it is: scales and norms of the source are in its weights.
    return Refinement(steps, plan.request.seed, update, constant=plan.latent_target().constant)


def attention_update(plan: Plan) -> AttentionUpdate:
    """The attention update of ``plan``'s layers: the family's residual scale and norm of the attention's output."""
    norms = plan.model.names.get(("attention_post_norm", 0))
    norm = None if norms is None else norms[0].split(".0.", 1)[1].removesuffix(".weight")
    return AttentionUpdate(plan.model.block.residual_scale, norm)
