"""The output projection of a converted layer, fitted to its place in the student.

The heads' results ``z`` are computed from the student's own inputs. With the teacher's residual ``h`` before the layer
and the student's ``h'``, the projection is to give ``(h + a(h)) - h'``, as in refinement (``training/refine.py``): a
layer also corrects the errors of those before it, as far as a linear map of its heads can. Every token's squared error
counts relative to its residual, as there: the norms that follow see relative errors, and the few tokens with massive
activations, the teacher's or the student's, would rule everything else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kvfold.attention.drift.recording import LayerOutput, OpenLayer
from kvfold.convert import processes
from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.linalg import fit_output
from kvfold.convert.transforms.weights import AttentionWeights
from kvfold.convert.walk.hidden import Hidden
from kvfold.convert.walk.walk import Step

# The share of an attention's energy that its heads may leave unexplained. A rounding to bfloat16 is off by up to 2^-9,
# 4e-6 of the energy, and there are a few; an output that is not this linear map of the heads is off by far more.
_UNEXPLAINED = 1e-3

Weights = TypeVar("Weights", AttentionWeights, LatentWeights)


@dataclass(frozen=True)
class AttentionUpdate:
    """The attention update of a layer, which is added to the residual: ``scale * norm(output)``.

    ``norm`` is the name of a module within the layer, None where the output is added as it is. In parallel blocks the
    update is the attention's part of what the layer adds.
    """

    scale: float = 1.0
    norm: str | None = None

    def of(self, layer: OpenLayer, output: LayerOutput) -> Tensor:
        """The attention update of ``layer``, ``[B, T, E]``."""
        attention = output.attention if self.norm is None else layer.run_submodule(self.norm, output.attention)
        return attention * self.scale


UNCHANGED = AttentionUpdate()


def token_weights(*residuals: Tensor) -> Tensor:
    """One over the root mean square of each token's residual ``[..., E]``, the largest of several, ``[..., 1]``."""
    square = torch.stack([residual.square().mean(-1, keepdim=True) for residual in residuals]).amax(0)
    # The smallest float32 even for float64, of whose smallest number the sums would overflow.
    return square.clamp_min(torch.finfo(torch.float32).tiny).rsqrt()


@dataclass(frozen=True)
class OutputFit:
    """The error of the residual after the layer's attention on held-out sequences, before and after.

    Each token's squared error counts relative to its residual. ``after`` is ``before`` where the fit was no better and
    the weights stayed as they were.
    """

    before: float
    after: float


class _Regression(NamedTuple):
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

    Held-out sequences decide whether it is kept. The fit is None where the layer does not show its heads' results, or
    the family normalizes the attention's output.
    """
    if update.norm is not None:
        return weights, None
    step.student.put(encode(weights))
    # [E, H D], with the bias as one more column where there is one.
    present = weights.o.flatten(1).double()
    if weights.o_bias is not None:
        present = torch.cat([present, weights.o_bias.double()[:, None]], 1)
    with step.student.stream.open_layer(step.index) as layer:
        common = step, layer, weights, present, update
        held_out = _regressions(*common, step.held_out, step.student_held_out)
        first = next(held_out, None)
        if first is None:
            return weights, None
        gram, missing = _sums(present, _regressions(*common, step.calibration, step.student_calibration))
        fit = partial(_fit, present, gram, missing, chain([first], held_out))
        fitted, before, after = processes.from_first(fit)
    if not after < before:
        return weights, OutputFit(before, before)
    size = weights.o[0].numel()
    output = fitted[:, :size].reshape(weights.o.shape).to(weights.o.dtype)
    bias = None if weights.o_bias is None else fitted[:, size].to(weights.o_bias.dtype)
    return replace(weights, o=output, o_bias=bias), OutputFit(before, after)


def _regressions(
    step: Step,
    layer: OpenLayer,
    weights: AttentionWeights | LatentWeights,
    present: Tensor,
    update: AttentionUpdate,
    teacher: Hidden,
    student: Hidden,
) -> Iterator[_Regression]:
    """Chunk by chunk; nothing where the layer's output is not a linear map of the heads' results that it shows."""
    checked = False
    for inputs, student_inputs in zip(teacher, student, strict=True):
        output = layer.attend(student_inputs)
        if output.context is None:
            return
        # The heads of layout ``engine`` may be padded with zeros.
        heads = output.context[..., : weights.o.shape[2]].flatten(2).double()
        if weights.o_bias is not None:
            heads = torch.cat([heads, torch.ones_like(heads[..., :1])], -1)
        if not checked:
            # A property of the layer, whatever its inputs: one chunk tells.
            explained = heads @ present.to(heads).mT
            energy = output.attention.double().square().sum()
            if explained.shape != output.attention.shape:
                return
            if (explained - output.attention).square().sum() > _UNEXPLAINED * energy:
                return
            checked = True
        added = update.of(step.teacher, step.teacher.attend(inputs))
        after, before = (inputs + added).double(), student_inputs.double()
        weight = token_weights(after, before).square()
        target = (after - before) / update.scale
        yield _Regression(heads.flatten(0, 1), target.flatten(0, 1), weight.flatten())


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


def _fit(
    present: Tensor, gram: Tensor, missing: Tensor, held_out: Iterable[_Regression]
) -> tuple[Tensor, float, float]:
    """The fitted projection, and the weighted mean squared errors of ``present`` and of it."""
    fitted = fit_output(present, gram, missing)
    before = after = numbers = 0.0
    # One chunk is in memory at a time.
    for heads, target, weight in held_out:
        before += float(((target - heads @ present.mT).square().sum(1) * weight).sum())
        after += float(((target - heads @ fitted.mT).square().sum(1) * weight).sum())
        numbers += target.numel()
    return fitted, before / numbers, after / numbers
