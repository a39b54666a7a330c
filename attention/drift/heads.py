"""Drift head by head: contributions to the attention's output, and the matching of a converted layer's heads.

Shapes: ``N`` positions of all sequences, ``H`` query heads, ``Dv`` value dim, ``E`` model dim. A head's contribution is
its term in the output projection's sum, ``W_o[:, h] z_h [N, E]``. It does not depend on the basis that a head's values
are written in, which conversions change freely. What a conversion moves from a head into the output bias counts as that
head's difference.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attention.drift.profile import row_kl
from kvfold.attention.drift.streams import LayerOutput

_SAMPLED = 1 << 22  # numbers compared to match heads
_CLEARLY = 0.5  # heads are relabeled when that explains at least half of the difference


@dataclass(frozen=True)
class Heads:
    """The heads of one layer: weighted values ``context [N, H, Dv]`` and output projection ``weight [E, H, Dv]``."""

    context: Tensor
    weight: Tensor

    @property
    def count(self) -> int:
        return self.context.shape[1]

    def contribution(self, head: int) -> Tensor:
        """The contribution of one head to the attention's output: ``[N, E]``, float32 or wider."""
        wide = torch.promote_types(self.context.dtype, torch.float32)
        return self.context[:, head].to(wide) @ self.weight[:, head].to(wide).mT


def heads_of(output: LayerOutput, device: torch.device) -> Heads | None:
    """The heads of a layer's output on ``device``, or None where the model does not show them."""
    if output.context is None or output.output_weight is None:
        return None
    return Heads(output.context.flatten(0, 1).to(device), output.output_weight.to(device))


def compare_heads(teacher: Heads, student: Heads, order: Tensor) -> tuple[Tensor, Tensor]:
    """Squared difference of head ``h`` of the teacher to ``order[h]`` of the student, and size: ``[H]`` float64."""
    differences, sizes = [], []
    for head, other in enumerate(order.tolist()):
        added = teacher.contribution(head)
        differences.append(squares(added - student.contribution(other)))
        sizes.append(squares(added))
    return torch.stack(differences), torch.stack(sizes)


def match_heads(teacher: Heads, student: Heads) -> Tensor:
    """The student's head that corresponds to each head of the teacher: ``[H]``.

    Folding may relabel heads (a layer computes the same in any order). Heads keep their number unless another matching,
    made of the most similar pairs first, leaves less than half of the difference.
    """
    ours, theirs = _sample(teacher), _sample(student)
    product = ours @ theirs.mT
    distance = (ours.square().sum(1)[:, None] + theirs.square().sum(1) - 2 * product).clamp_min(0).cpu()
    cosine = product / (ours.norm(dim=1)[:, None] * theirs.norm(dim=1)).clamp_min(torch.finfo(product.dtype).tiny)
    same = torch.arange(teacher.count)
    order = _greedy(cosine.cpu())
    return order if distance[same, order].sum() < _CLEARLY * distance[same, same].sum() else same


def squares(values: Tensor) -> Tensor:
    """Sum of squares, float64."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    total: Tensor = torch.linalg.vector_norm(wide, dim=-1).double().square().sum()
    return total


def _sample(heads: Heads) -> Tensor:
    """Contributions of all heads at some positions spread over the batch: ``[H, n * E]``, float64."""
    count = max(1, _SAMPLED // (heads.count * heads.weight.shape[0]))
    some = heads.context[:: -(-heads.context.shape[0] // count)].double()
    return torch.einsum("nhd,ehd->hne", some, heads.weight.double()).flatten(1)


def _greedy(similarity: Tensor) -> Tensor:
    """A one-to-one matching of rows to columns, the most similar pair first: ``[H]``."""
    heads = similarity.shape[0]
    order = torch.zeros(heads, dtype=torch.long)
    free = similarity.clone()
    for _ in range(heads):
        row, column = divmod(int(free.argmax()), heads)
        order[row] = column
        free[row], free[:, column] = -torch.inf, -torch.inf
    return order


def compare_rows(teacher: LayerOutput, student: LayerOutput, order: Tensor) -> Tensor | None:
    """Row KL of matched heads ``[H]``, or None where it does not say all.

    That is where one side shows no queries and keys, where masks differ, and where sinks take part of each row.
    """
    if teacher.query is None or teacher.key is None or student.query is None or student.key is None:
        return None
    if teacher.sinks is not None or student.sinks is not None:
        return None
    window = _window(teacher)
    if student.query.shape[1] != teacher.query.shape[1] or _window(student) != window:
        return None
    device = teacher.query.device
    query, key = student.query.to(device), student.key.to(device)
    matched = order.to(device)
    same = bool((order == torch.arange(len(order))).all())
    return row_kl(
        teacher.query,
        teacher.key,
        query if same else query[:, matched],
        key if same else key[:, matched // (query.shape[1] // key.shape[1])],
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
