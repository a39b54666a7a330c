"""Refits the output projection of a converted layer to the student's own inputs.

The heads' results ``z`` are computed from the student's inputs. With the residual ``h`` before the
layer in the teacher and ``h'`` in the student, the target of the projection is ``(h + a(h)) - h'``,
as in refinement (``training/refine.py``): a layer thus also corrects the errors of earlier layers,
as far as a linear map of its heads can. As in refinement, the squared error of every token is
relative to its residual: the norms that follow see relative errors, and otherwise the few tokens
with massive activations, in the teacher or the student, would dominate. Where a norm follows the
projection, its targets are those that the norm, near the present output, turns into the above.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from kvfold.attention.drift.recording import OpenLayer
from kvfold.convert.transforms.latent.latent_weights import LatentWeights
from kvfold.convert.transforms.linalg import fit_output_projection
from kvfold.convert.transforms.weights import AttentionWeights
from kvfold.convert.walk.walk import WalkLayer

# The maximum share of the attention output's energy that the heads may leave unexplained. One
# rounding to bfloat16 is off by up to 2^-9, 4e-6 of the energy, and there are a few; an output that
# is no such linear map is off by far more.
_UNEXPLAINED = 1e-3
# The gain that a channel of a norm must have to be fitted, relative to the median: chosen.
_LEAST_GAIN = 0.1

Weights = TypeVar("Weights", bound=AttentionWeights | LatentWeights)


@dataclass(frozen=True)
class AttentionUpdate:
    """How a layer adds its attention output to the residual stream: ``scale * norm(output)``.

    ``norm`` is the name of a module in the layer, or None if the output is added without a norm. In
    parallel blocks the update is only the attention's part of the sum that the layer adds.
    """

    scale: float = 1.0
    norm: str | None = None

    def compute_update(self, layer: OpenLayer, attention: Tensor) -> Tensor:
        """The update ``[..., E]`` that ``layer`` computes from its ``attention`` output."""
        return self.apply_norm(layer, attention) * self.scale

    def apply_norm(self, layer: OpenLayer, attention: Tensor) -> Tensor:
        """Return the ``attention`` output of ``layer`` as its norm, if any, leaves it."""
        return attention if self.norm is None else layer.run_submodule(self.norm, attention)

    def undo_norm(
        self, layer: OpenLayer, output: Tensor, target: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return targets ``[N, E]`` of the attention output itself, given a ``target`` of what the
        norm makes of it, and their token weights ``[N]``.

        An RMSNorm multiplies by its gain and divides by a number per token. Where the norm is
        close to that of the present ``output``, this number hardly changes.
        """
        gain = self.apply_norm(layer, torch.ones_like(output[:1]))
        normed = self.apply_norm(layer, output)
        tiny = torch.finfo(output.dtype).tiny
        before = (output * gain).norm(dim=1)
        after = normed.norm(dim=1)
        # Channels with little gain would need large outputs, which change the norm of all others.
        usable = gain.abs() > _LEAST_GAIN * gain.abs().median()
        change = torch.where(usable, (target - normed) / gain, 0)
        target = output + change * (before / after.clamp_min(tiny))[:, None]
        return target, weight * (after / before.clamp_min(tiny)).square()


UNCHANGED = AttentionUpdate()


def compute_token_weights(*residuals: Tensor) -> Tensor:
    """Return one weight per token, ``[..., 1]``: one over the RMS of its residual ``[..., E]``, of
    several residuals the largest.
    """
    square = torch.stack([residual.square().mean(-1, keepdim=True) for residual in residuals]).amax(
        0
    )
    # The smallest float32 even for float64: with the smallest float64, sums would overflow.
    return square.clamp_min(torch.finfo(torch.float32).tiny).rsqrt()


# One row per token, in float32 or wider: the heads' results ``[N, n]``, their present projection
# and its target, both ``[N, E]``, and weights ``[N]``.
_Regression = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.no_grad()
def refit_output_projection(
    walk_layer: WalkLayer, weights: Weights, update: AttentionUpdate
) -> Weights:
    """Return ``weights`` with the output projection (and bias, if any) refitted, so that the
    student's residual stream after the attention matches the teacher's.

    They are unchanged if the error of the residual after the attention on held-out sequences does
    not fall, or if the layer does not expose its heads' results.
    """
    student = walk_layer.student
    student.set_layer_tensors(student.output.encode_layer(walk_layer.index, weights))
    # [E, H D], with the bias, if any, as one more column, where the regressions are.
    present = weights.o.flatten(1).double()
    if weights.o_bias is not None:
        present = torch.cat([present, weights.o_bias.double()[:, None]], 1)
    present = present.to(student.stream.device)
    teacher = walk_layer.teacher
    with student.stream.open_layer(walk_layer.index) as layer:
        attention = [output.attention for output in teacher.outputs]
        chunks = zip(teacher.held_out, attention, walk_layer.held_out, strict=True)
        held_out = _yield_regressions(layer, weights, present, update, chunks)
        first = next(held_out, None)
        if first is None:
            return weights
        chunks = zip(teacher.calibration, teacher.attention, walk_layer.calibration, strict=True)
        regressions = _yield_regressions(layer, weights, present, update, chunks)
        with student.stream.use_training_precision():
            gram, cross = _sum_regressions(layer, present, update, regressions)
        fitted = _fit_if_better(layer, present, update, gram, cross, chain([first], held_out))
    if fitted is None:
        return weights
    size = weights.o[0].numel()
    output = fitted[:, :size].reshape(weights.o.shape).to(weights.o)
    bias = None if weights.o_bias is None else fitted[:, size].to(weights.o_bias)
    return replace(weights, o=output, o_bias=bias)


def _yield_regressions(
    layer: OpenLayer,
    weights: AttentionWeights | LatentWeights,
    present: Tensor,
    update: AttentionUpdate,
    chunks: Iterable[tuple[Tensor, Tensor, Tensor]],
) -> Iterator[_Regression]:
    """Yield for each chunk of sequences the heads' results ``[N, n]``, the present attention output
    ``[N, E]``, its target, or that of the norm behind it, and token weights ``[N]``. Yields nothing
    if the recorded results do not explain the attention output.

    A chunk has the teacher's residual stream before the layer, its attention's output, and the
    student's residual stream.
    """
    checked = False
    for before, attention, student_before in chunks:
        output = layer.attend(student_before)
        if output.context is None:
            return
        # The heads of layout ``engine`` may be padded with zeros.
        wide = torch.promote_types(output.context.dtype, torch.float32)
        heads = output.context[..., : weights.o.shape[2]].flatten(2).to(wide)
        if weights.o_bias is not None:
            heads = torch.cat([heads, torch.ones_like(heads[..., :1])], -1)
        if not checked:
            # A property of the layer, independent of its inputs: checking one sequence is enough.
            explained = heads[:1] @ present.to(heads).mT
            expected = output.attention[:1]
            checked = explained.shape == expected.shape
            energy = expected.to(wide).square().sum()
            if not checked or (explained - expected).square().sum() > _UNEXPLAINED * energy:
                return
        before, attention, student_before = (
            states.to(heads.device) for states in (before, attention, student_before)
        )
        after = (before + update.compute_update(layer, attention)).to(wide)
        student_before = student_before.to(wide)
        weight = compute_token_weights(after, student_before).square()
        target = (after - student_before) / update.scale
        present_output = output.attention.to(wide).flatten(0, 1)
        yield heads.flatten(0, 1), present_output, target.flatten(0, 1), weight.flatten()


def _sum_regressions(
    layer: OpenLayer,
    present: Tensor,
    update: AttentionUpdate,
    regressions: Iterator[_Regression],
) -> tuple[Tensor, Tensor]:
    """Return the weighted means of ``z z^T`` and ``target z^T`` over all sequences; ``z`` are the
    heads' results.
    """
    count = len(present[0])
    gram = present.new_zeros(count, count)
    cross = torch.zeros_like(present)
    total = present.new_zeros(())
    for heads, output, target, weight in regressions:
        if update.norm is not None:
            target, weight = update.undo_norm(layer, output, target, weight)
        # Products of a chunk in the tokens' dtype: `OUTPUT_RIDGE` is far above what float32 rounds.
        # Weights may come near the end of its range.
        largest = weight.max().clamp_min(torch.finfo(weight.dtype).tiny)
        scaled = heads * (weight / largest)[:, None]
        with torch.autocast(heads.device.type, enabled=False):
            gram += largest.double() * (scaled.mT @ heads)
            cross += largest.double() * (target.mT @ scaled)
        total += weight.double().sum()
    total = torch.where(total != 0, total, 1.0)
    return gram / total, cross / total


def _fit_if_better(
    layer: OpenLayer,
    present: Tensor,
    update: AttentionUpdate,
    gram: Tensor,
    cross: Tensor,
    held_out: Iterable[_Regression],
) -> Tensor | None:
    """Return the refitted output projection ``[E, n]``; None if its weighted squared error on
    ``held_out`` is not below that of ``present``.
    """
    fitted = fit_output_projection(present, gram, cross)
    change = fitted - present
    gain = 0.0
    # One chunk is in memory at a time.
    for heads, output, target, weight in held_out:
        before, after = (
            (target - update.apply_norm(layer, attention)).square().sum(1).double()
            for attention in (output, output + heads @ change.to(heads).mT)
        )
        gain += float((before - after) @ weight.double())
    return fitted if gain > 0 else None
