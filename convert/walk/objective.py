"""What refinement compares: the residual stream after a layer's attention, the student's with the teacher's.

What attention adds to the residual is its output, times the family's residual scale, after its own norm in families
that norm it (olmo2, gemma). In parallel blocks it is the attention's share of what the layer adds. The target of the
student's share is what the teacher's residual has become, less what the student's was: ``(h + a(h)) - h'``, so that a
layer also mends what those before it got wrong.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attention.drift.recording import OpenLayer
from kvfold.attention.drift.streams import LayerOutput
from kvfold.convert.walk.walk import Hidden


@dataclass(frozen=True)
class Share:
    """How a layer adds its attention's output to the residual: ``scale * norm(output)``; ``norm`` is a module's name
    within the layer, None where the output is added as it is."""

    scale: float = 1.0
    norm: str | None = None

    def of(self, layer: OpenLayer, output: LayerOutput) -> Tensor:
        """What ``layer``'s attention adds, ``[B, T, E]``."""
        attention = output.attention
        if self.norm is not None:
            attention = layer.run_submodule(self.norm, attention)
        return attention * self.scale


PLAIN = Share()


@dataclass(frozen=True)
class Examples:
    """The student's residual before a layer, and what its attention should add to it, in the walk's chunks."""

    inputs: Hidden
    targets: Hidden
    energy: float  # mean square of what the teacher's attention adds
    numbers: int  # elements of the targets

    @property
    def count(self) -> int:
        """Sequences."""
        return sum(len(chunk) for chunk in self.inputs)

    def batch(self, picks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The sequences ``picks``, ``[len(picks), T, E]`` each."""
        size = len(self.inputs[0])
        return (
            torch.stack([self.inputs[pick // size][pick % size] for pick in picks]),
            torch.stack([self.targets[pick // size][pick % size] for pick in picks]),
        )

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All sequences, chunk by chunk."""
        yield from zip(self.inputs, self.targets, strict=True)


@torch.no_grad()
def examples(share: Share, teacher: OpenLayer, hidden: Hidden, student: Hidden) -> Examples:
    """Run ``teacher``'s attention over its inputs ``hidden``; ``student`` are the student's on the same tokens."""
    targets, energy, numbers = [], 0.0, 0
    for theirs, own in zip(hidden, student, strict=True):
        added = share.of(teacher, teacher.attend(theirs))
        energy += squares(added)
        numbers += added.numel()
        wide = torch.promote_types(added.dtype, torch.float32)
        targets.append((theirs.to(wide) + added.to(wide) - own.to(wide)).to(own.dtype))
    return Examples(student, targets, energy / numbers, numbers)


def squares(tensor: Tensor) -> float:
    """Sum of squares, in float64."""
    return float(tensor.double().square().sum())
