"""The loss of refinement: squared difference of the student's and the teacher's residual stream after attention.

The attention update of the residual is attention's output, times the family's residual scale, normed in families
that norm it (olmo2, gemma). In parallel blocks it is the attention's part of what the layer adds. With ``h`` the
teacher's residual before the layer and ``h'`` the student's, the student's attention is to add

    target = (h + a(h)) - h'

so that a layer also corrects the errors of those before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attention.drift.recording import OpenLayer
from kvfold.attention.drift.streams import LayerOutput
from kvfold.convert.walk.walk import Hidden


@dataclass(frozen=True)
class AttentionUpdate:
    """The attention update of a layer, what it adds to the residual: ``scale * norm(output)``.

    ``norm`` is the name of a module within the layer, None where the output is added as it is.
    """

    scale: float = 1.0
    norm: str | None = None

    def of(self, layer: OpenLayer, output: LayerOutput) -> Tensor:
        """The attention update of ``layer``, ``[B, T, E]``."""
        attention = output.attention
        if self.norm is not None:
            attention = layer.run_submodule(self.norm, attention)
        return attention * self.scale


UNCHANGED = AttentionUpdate()


@dataclass(frozen=True)
class Examples:
    """The student's residual before a layer, and what its attention should add to it, in the walk's chunks."""

    inputs: Hidden
    targets: Hidden
    energy: float  # mean square of the teacher's attention update
    numbers: int  # elements of the targets

    @property
    def count(self) -> int:
        """Sequences."""
        return sum(len(chunk) for chunk in self.inputs)

    def batch(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some ``sequences``, ``[len(sequences), T, E]`` each."""
        size = len(self.inputs[0])
        inputs, targets = (
            torch.stack([chunks[index // size][index % size] for index in sequences])
            for chunks in (self.inputs, self.targets)
        )
        return inputs, targets

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All sequences, chunk by chunk."""
        yield from zip(self.inputs, self.targets, strict=True)


@torch.no_grad()
def examples(update: AttentionUpdate, teacher: OpenLayer, hidden: Hidden, student_hidden: Hidden) -> Examples:
    """Run ``teacher``'s attention over its inputs ``hidden``; ``student_hidden`` are the student's, of the same tokens.

    ``update`` is the teacher's.
    """
    targets, energy, numbers = [], 0.0, 0
    for inputs, student_inputs in zip(hidden, student_hidden, strict=True):
        added = update.of(teacher, teacher.attend(inputs))
        energy += squares(added)
        numbers += added.numel()
        wide = torch.promote_types(added.dtype, torch.float32)
        target = inputs.to(wide) + added.to(wide) - student_inputs.to(wide)
        targets.append(target.to(student_inputs.dtype))
    return Examples(student_hidden, targets, energy / numbers, numbers)


def squares(tensor: Tensor) -> float:
    """Sum of squares, in float64."""
    return float(tensor.double().square().sum())
