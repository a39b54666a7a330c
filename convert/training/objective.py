"""The loss of refinement: squared difference of the student's and the teacher's residual stream after attention.

The attention update of the residual is attention's output, times the family's residual scale, normed in families
that norm it (olmo2, gemma). In parallel blocks it is the attention's part of what the layer adds. With ``h`` the
teacher's residual before the layer and ``h'`` the student's, the student's attention is to add

    target = (h + a(h)) - h'

so that a layer also corrects the errors of those before it. Each token's error counts relative to the size of its own
residual, as the norms that read it see it: in trained decoders a few tokens (attention sinks, the first above all) have
residuals hundreds of times larger than the others and would be all that the sum is made of. The larger of ``h + a(h)``
and ``h'`` tells the size: where a small cache makes the student grow such a token that the teacher does not have, no
attention can take it back, and relative to the teacher's residual it alone would be the sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attention.drift.recording import OpenLayer
from kvfold.convert import processes
from kvfold.convert.walk.hidden import Hidden, sequence
from kvfold.convert.walk.output_fit import AttentionUpdate, token_weights

Batch = tuple[Tensor, Tensor, Tensor]  # inputs, targets, weights


@dataclass(frozen=True)
class Examples:
    """The student's residual before a layer, and what its attention should add to it, in the walk's chunks.

    ``weights [b, T, 1]``: what a token's error is multiplied by. ``energy`` is the mean square of the teacher's
    attention update, ``inherited`` that of the student's error before the layer, both weighted; ``numbers`` are the
    elements of the targets. Of ``count`` sequences that several processes share, these are the ``own``.
    """

    inputs: Hidden
    targets: Hidden
    weights: Hidden
    energy: float
    inherited: float
    numbers: int
    count: int
    own: range

    def batch(self, sequences: Sequence[int]) -> Batch:
        """Inputs, targets and weights of some of the ``own`` sequences, ``[len(sequences), T, E]`` or ``[..., 1]``."""
        places = [index - self.own.start for index in sequences]
        inputs, targets, weights = (
            torch.stack([sequence(states, place) for place in places])
            for states in (self.inputs, self.targets, self.weights)
        )
        return inputs, targets, weights

    def batches(self) -> Iterator[Batch]:
        """All sequences, chunk by chunk."""
        yield from zip(self.inputs, self.targets, self.weights, strict=True)


@torch.no_grad()
def examples(
    update: AttentionUpdate,
    teacher: OpenLayer,
    hidden: Hidden,
    student_hidden: Hidden,
    *,
    correct: bool = True,
    shared: bool = False,
) -> Examples:
    """Run ``teacher``'s attention over its inputs ``hidden``; ``student_hidden`` are the student's, of the same tokens.

    ``update`` is the teacher's. Without ``correct`` the target is its attention update alone, ``a(h)``. ``shared`` says
    that ``hidden`` are this process's share of the sequences: sums and counts are then those of all.
    """
    targets, weights = student_hidden[:0], student_hidden[:0]  # in a file where these are in one
    energy, inherited, numbers, count = 0.0, 0.0, 0, 0
    for inputs, student_inputs in zip(hidden, student_hidden, strict=True):
        added = update.of(teacher, teacher.attend(inputs))
        wide = torch.promote_types(added.dtype, torch.float32)
        residual, student_residual = (each.to(wide) for each in (inputs, student_inputs))
        added, before = added.to(wide), residual - student_residual
        weight = token_weights(residual + added, student_residual)
        weights.append(weight)
        targets.append((added + before if correct else added).to(student_inputs.dtype))
        energy += squares(added * weight)
        inherited += squares(before * weight)
        numbers += added.numel()
        count += len(added)
    own = range(count)
    if shared:
        energy, inherited, all_numbers, all_count = processes.total(energy, inherited, numbers, count)
        numbers, count = int(all_numbers), int(all_count)
        own = processes.part(count)
    return Examples(student_hidden, targets, weights, energy / numbers, inherited / numbers, numbers, count, own)


def squares(tensor: Tensor) -> float:
    """Sum of squares, in float64."""
    return float(tensor.double().square().sum())
