"""Head by head: what each contributes to the attention's output, and which head of a converted layer is which.

Shapes: ``N`` positions of all sequences, ``H`` query heads, ``Dv`` value dim, ``E`` model dim. A head's contribution is
its share of the output projection's sum, ``W_o[:, h] z_h [N, E]``. It does not depend on the basis that a head's values
are written in, which conversions change freely. What a conversion moves from a head into the output bias counts as that
head's difference.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attention.drift.profile import row_kl
from kvfold.attention.drift.streams import LayerOutput

_SAMPLED = 1 << 22  # numbers looked at to tell which head is which
_CLEARLY = 0.5  # a relabelling is believed when it explains at least half of what looks like error


@dataclass(frozen=True)
class Heads:
    """The heads of one layer: weighted values ``mixed [N, H, Dv]`` and output projection ``weight [E, H, Dv]``."""

    mixed: Tensor
    weight: Tensor

    @property
    def count(self) -> int:
        return self.mixed.shape[1]

    def contribution(self, head: int) -> Tensor:
        """What one head adds to the attention's output: ``[N, E]``, float32 or wider."""
        wide = torch.promote_types(self.mixed.dtype, torch.float32)
        return self.mixed[:, head].to(wide) @ self.weight[:, head].to(wide).mT


def heads_of(output: LayerOutput, device: torch.device) -> Heads | None:
    """The heads of a layer's output on ``device``, or None where the model does not show them."""
    if output.mixed is None or output.output_weight is None:
        return None
    return Heads(output.mixed.flatten(0, 1).to(device), output.output_weight.to(device))


def compare_heads(teacher: Heads, student: Heads, order: Tensor) -> tuple[Tensor, Tensor]:
    """Squared difference of head ``h`` of the teacher to ``order[h]`` of the student, and size: ``[H]`` float64."""
    differences, sizes = [], []
    for head, other in enumerate(order.tolist()):
        mine = teacher.contribution(head)
        differences.append(squares(mine - student.contribution(other)))
        sizes.append(squares(mine))
    return torch.stack(differences), torch.stack(sizes)


def match_heads(teacher: Heads, student: Heads) -> Tensor:
    """Which head of the student plays each head of the teacher: ``[H]``.

    Folding may relabel heads (a layer computes the same whatever their order). Heads keep their number unless another
    matching, made of the most similar pairs first, leaves less than half of the difference.
    """
    mine, theirs = _sample(teacher), _sample(student)
    product = mine @ theirs.mT
    distance = (mine.square().sum(1)[:, None] + theirs.square().sum(1) - 2 * product).clamp_min(0)
    cosine = product / (mine.norm(dim=1)[:, None] * theirs.norm(dim=1)).clamp_min(torch.finfo(product.dtype).tiny)
    same = torch.arange(teacher.count)
    order = _greedy(cosine.cpu())
    left = distance.cpu()
    return order if left[same, order].sum() < _CLEARLY * left[same, same].sum() else same


def squares(values: Tensor) -> Tensor:
    """Sum of squares, float64."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    total: Tensor = torch.linalg.vector_norm(wide, dim=-1).double().square().sum()
    return total


def _sample(heads: Heads) -> Tensor:
    """Contributions of all heads at some positions spread over the batch: ``[H, n * E]``, float64."""
    count = max(1, _SAMPLED // (heads.count * heads.weight.shape[0]))
    some = heads.mixed[:: -(-heads.mixed.shape[0] // count)].double()
    return torch.einsum("nhd,ehd->hne", some, heads.weight.double()).flatten(1)


def _greedy(likeness: Tensor) -> Tensor:
    """A one-to-one matching of rows to columns, the most alike pair first: ``[H]``."""
    heads = likeness.shape[0]
    order = torch.zeros(heads, dtype=torch.long)
    free = likeness.clone()
    for _ in range(heads):
        row, column = divmod(int(free.argmax()), heads)
        order[row] = column
        free[row], free[:, column] = -torch.inf, -torch.inf
    return order


def compare_rows(teacher: LayerOutput, student: LayerOutput, order: Tensor) -> Tensor | None:
    """Row KL of matched heads ``[H]``, or None where one side shows no queries and keys or sees other positions."""
    if teacher.query is None or teacher.key is None or student.query is None or student.key is None:
        return None
    window = _window(teacher)
    if student.query.shape[1] != teacher.query.shape[1] or _window(student) != window:
        return None
    device = teacher.query.device
    query, key = student.query.to(device), student.key.to(device)
    moved = order.to(device)
    same = bool((order == torch.arange(len(order))).all())
    return row_kl(
        teacher.query,
        teacher.key,
        query if same else query[:, moved],
        key if same else key[:, moved // (query.shape[1] // key.shape[1])],
        teacher.scale,
        student.scale,
        window=window,
        causal=teacher.causal,
        softcap=teacher.softcap,
        other_softcap=student.softcap,
    )


def _window(output: LayerOutput) -> int | None:
    length = output.attention.shape[1]
    return None if output.window is None or output.window >= length else output.window
