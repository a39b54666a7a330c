"""The output projection of a converted layer, fitted to what is left to do at its place in the student.

The heads' results ``z`` are computed from the student's own inputs. With the teacher's residual ``h`` before the layer
and the student's ``h'``, the projection is to give ``(h + a(h)) - h'``, as in refinement (``objective.py``): so a layer
also makes up for those before it, as far as a linear map of its heads can. Every token's squared error counts relative
to its residual, as there: following norms see relative errors, and the few tokens with massive activations, the
teacher's or the student's, would rule everything else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvfold.attention.drift.recording import OpenLayer
from kvfold.convert import processes
from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.output import fit_output
from kvfold.convert.transforms.weights import AttentionWeights
from kvfold.convert.walk.hidden import Hidden
from kvfold.convert.walk.objective import AttentionUpdate, token_weights
from kvfold.convert.walk.walk import Step

_EXPLAINED = 1e-3  # the share of an attention's energy that its heads may leave unexplained: rounding

Weights = TypeVar("Weights", AttentionWeights, LatentWeights)


@dataclass(frozen=True)
class OutputFit:
    """The error of the residual after the layer's attention on held-out sequences, before and after.

    Each token's squared error counts relative to its residual. ``after`` is ``before`` where the fit was no
    better and the weights stayed as they were.
    """

    before: float
    after: float

    def record(self) -> dict[str, Any]:
        """For ``kvfold.json``."""
        return {"before": self.before, "after": self.after}


@dataclass(frozen=True)
class _Regression:
    """Tokens as rows: the heads' results ``[N, n]``, the target of their projection ``[N, E]``, weights ``[N]``."""

    heads: Tensor
    target: Tensor
    weight: Tensor


@torch.no_grad()
def refit_output(
    step: Step,
    weights: Weights,
    encode: Callable[[Weights], Mapping[str, Tensor]],
    update: AttentionUpdate,
) -> tuple[Weights, OutputFit | None]:
    """``weights`` with the output projection (and bias, where there is one) that fits the student's stream best.

    Held-out sequences decide whether it is kept. None where the projection's inputs are not to be seen, or the family
    norms what it gives.
    """
    if update.norm is not None:
        return weights, None
    step.twin.put(encode(weights))
    present = _projection(weights)
    with step.twin.stream.open_layer(step.index) as layer:
        held_out = _regressions(step, layer, weights, update, step.held_out, step.student_held_out)
        first = next(held_out, None)
        if first is None:
            return weights, None
        gram, missing = _sums(
            present, _regressions(step, layer, weights, update, step.calibration, step.student_calibration)
        )

        def fit() -> tuple[Tensor, float, float]:
            projection = fit_output(present, gram, missing)
            before, after = _errors([present, projection], chain([first], held_out))
            return projection, before, after

        fitted, before, after = processes.from_first(fit)
    if not after < before:
        return weights, OutputFit(before, before)
    return _with_projection(weights, fitted), OutputFit(before, after)


def _regressions(
    step: Step, layer: OpenLayer, weights: Weights, update: AttentionUpdate, teacher: Hidden, student: Hidden
) -> Iterator[_Regression]:
    """Chunk by chunk; nothing where the layer's output is not a linear map of the heads' results that it shows."""
    shown = False
    for inputs, own in zip(teacher, student, strict=True):
        output = layer.attend(own)
        if output.context is None:
            return
        heads = output.context[..., : weights.o.shape[2]].flatten(2).double()  # engines' heads are padded with zeros
        if weights.o_bias is not None:
            heads = torch.cat([heads, torch.ones_like(heads[..., :1])], -1)
        if not shown and not _explains(heads @ _projection(weights).to(heads).mT, output.attention):
            return
        shown = True  # of the layer, not of its inputs
        update_of = update.of(step.teacher, step.teacher.attend(inputs))
        after, own = (step.teacher.own(inputs) + update_of).double(), step.teacher.own(own).double()
        weight = token_weights(after, own).square()
        target = (after - own) / update.scale
        yield _Regression(heads.flatten(0, 1), target.flatten(0, 1), weight.flatten())


def _explains(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool(
        (found - expected).square().sum() <= _EXPLAINED * expected.double().square().sum()
    )


def _sums(present: Tensor, parts: Iterator[_Regression]) -> tuple[Tensor, Tensor]:
    """The weighted means of ``z z^T`` and ``(target - present z) z^T`` over the sequences of all processes."""
    count = len(present[0])
    gram, cross, total = present.new_zeros(count, count), torch.zeros_like(present), present.new_zeros(())
    for part in parts:
        heads = part.heads * part.weight[:, None]
        gram.addmm_(heads.mT, part.heads)
        cross.addmm_(part.target.mT, heads)
        total += float(part.weight.sum())
    processes.add_up([gram, cross, total])
    total = total if total else torch.ones_like(total)
    return gram / total, (cross - present @ gram) / total


def _errors(projections: list[Tensor], parts: Iterable[_Regression]) -> list[float]:
    """The weighted mean squared error of each projection; of ``parts`` one is in memory at a time."""
    wrong, numbers = [0.0] * len(projections), 0
    for part in parts:
        for place, projection in enumerate(projections):
            missing = part.target - part.heads @ projection.mT
            wrong[place] += float((missing.square().sum(1) * part.weight).sum())
        numbers += part.target.numel()
    return [each / numbers for each in wrong]


def _projection(weights: AttentionWeights | LatentWeights) -> Tensor:
    """``[E, H D]``, with the bias as one more column where there is one; float64."""
    output = weights.o.flatten(1).double()
    return output if weights.o_bias is None else torch.cat([output, weights.o_bias.double()[:, None]], 1)


def _with_projection(weights: Weights, projection: Tensor) -> Weights:
    size = weights.o[0].numel()
    output = projection[:, :size].reshape(weights.o.shape).to(weights.o.dtype)
    if weights.o_bias is None:
        return replace(weights, o=output)
    return replace(weights, o=output, o_bias=projection[:, size].to(weights.o_bias.dtype))
