"""Drift measured in lockstep: two models go through the same tokens side by side, one layer of each in memory.

The *teacher* gives the reference, the *student* is compared with it. Local numbers come from the student's layer run on
the teacher's residual stream, so that they show what this layer alone adds; propagated ones from the student's own.
Shapes: ``B`` sequences of a batch, ``T`` positions, ``E`` model dim, ``V`` vocabulary.
"""

import math
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.attention.drift.heads import compare_heads, compare_rows, heads_of, match_heads, squares
from kvfold.attention.drift.profile import divergence
from kvfold.attention.drift.streams import LayerOutput, LayerStream, StreamLayer

_CPU_LOGITS = 1 << 23
_GPU_LOGITS = 1 << 27


@dataclass(frozen=True)
class HeadDrift:
    """One head of the teacher and the corresponding head of the student.

    ``error`` is the relative error of what the head adds to the attention's output, ``row_kl`` the mean KL of its
    attention rows in nats, both on the teacher's inputs.
    """

    head: int
    student_head: int
    error: float
    row_kl: float | None


@dataclass(frozen=True)
class LayerDrift:
    """Relative errors ``||y - y'|| / ||y||`` of a layer's attention output and of the residual stream after it.

    ``row_kl`` is the mean over heads, ``None`` where one side has no attention maps that can be compared; ``heads`` is
    empty where head counts differ.
    """

    layer: int
    attention_local: float
    attention_propagated: float
    residual_local: float
    residual_propagated: float
    row_kl: float | None
    heads: tuple[HeadDrift, ...]


@dataclass(frozen=True)
class Measurement:
    """A student against a teacher, over ``predictions`` predicted tokens.

    ``kl`` is the mean KL(p || p') of next-token distributions, losses are mean negative log likelihoods, both in nats;
    ``agreement`` is the top-1 agreement: the fraction of positions with the same most likely token. The margins are
    half the widths of the 95 % intervals of ``kl`` and ``excess`` over texts like these: sequences are independent
    draws, tokens of one are not, and both models see the same. None for a single sequence.
    """

    predictions: int
    kl: float
    agreement: float
    teacher_loss: float
    student_loss: float
    layers: tuple[LayerDrift, ...]
    kl_margin: float | None = None
    excess_margin: float | None = None

    @property
    def excess(self) -> float:
        """Nats per token that the student loses: ln of the ratio of perplexities."""
        return self.student_loss - self.teacher_loss


@dataclass(frozen=True)
class _Errors:
    """Squared difference and size of one quantity, summed over batches."""

    difference: Tensor | float
    size: Tensor | float

    def plus(self, other: "_Errors") -> "_Errors":
        return _Errors(self.difference + other.difference, self.size + other.size)

    @property
    def relative(self) -> float:
        return relative(float(self.difference), float(self.size))


def relative(difference: float, size: float) -> float:
    """``sqrt(difference / size)``; 0 where nothing differs, even when there is nothing."""
    if difference == 0:
        return 0.0
    return math.sqrt(difference / size) if size > 0 else math.inf


def compare(
    teacher: LayerStream,
    student: LayerStream,
    tokens: Tensor,
    batch: int,
    progress: Callable[[], None] = lambda: None,
) -> Measurement:
    """Run both models over ``tokens [N, T]``, ``batch`` sequences at a time; ``progress()`` follows each layer."""
    parts = torch.split(tokens, batch)
    expected = [teacher.embed(part) for part in parts]
    actual = [student.embed(part) for part in parts]
    layers = []
    for index in range(teacher.layers):
        with teacher.open_layer(index) as layer, student.open_layer(index) as student_layer:
            layers.append(compare_layer(index, layer, student_layer, expected, actual, student))
        progress()
    return replace(compare_predictions(teacher, student, expected, actual, parts), layers=tuple(layers))


def compare_layer(
    index: int,
    layer: StreamLayer,
    student_layer: StreamLayer,
    expected: MutableSequence[Tensor],
    actual: MutableSequence[Tensor],
    student: LayerStream,
) -> LayerDrift:
    """Take both residual streams (sequences of ``[B, T, E]``, replaced in place) through one layer."""
    totals = [_Errors(0.0, 0.0)] * 4
    heads = _HeadTotals()
    for part, (hidden, student_hidden) in enumerate(zip(expected, actual, strict=True)):
        shown = hidden.to(student.device, student.dtype)
        output, local = layer(hidden), student_layer(shown)
        propagated = local if torch.equal(shown, student_hidden) else student_layer(student_hidden)
        errors = [_error(output, other, what) for what in ("attention", "hidden") for other in (local, propagated)]
        totals = [total.plus(error) for total, error in zip(totals, errors, strict=True)]
        heads.add(output, local)
        expected[part], actual[part] = output.states, propagated.states
    attention_local, attention_propagated, residual_local, residual_propagated = (total.relative for total in totals)
    return LayerDrift(
        layer=index,
        attention_local=attention_local,
        attention_propagated=attention_propagated,
        residual_local=residual_local,
        residual_propagated=residual_propagated,
        row_kl=heads.mean_kl(),
        heads=heads.drifts(),
    )


class _HeadTotals:
    """Sums over batches of the comparison head by head. Heads are matched on the first batch."""

    def __init__(self) -> None:
        self.order: Tensor | None = None
        self.sums: list[tuple[Tensor, Tensor]] = []
        self.rows: list[tuple[Tensor, int]] = []

    def add(self, output: LayerOutput, other: LayerOutput) -> None:
        """Add one batch, unless a side does not show its heads or their numbers differ."""
        device = output.attention.device
        teacher, student = heads_of(output, device), heads_of(other, device)
        if teacher is None or student is None or teacher.count != student.count:
            return
        self.order = match_heads(teacher, student) if self.order is None else self.order
        self.sums.append(compare_heads(teacher, student, self.order))
        rows = compare_rows(output, other, self.order)
        if rows is not None:
            self.rows.append((rows, len(output.attention)))

    def kls(self) -> list[float] | None:
        if not self.rows:
            return None
        total = torch.stack([rows * size for rows, size in self.rows]).sum(0)
        mean: list[float] = (total / sum(size for _, size in self.rows)).tolist()
        return mean

    def mean_kl(self) -> float | None:
        kls = self.kls()
        return None if kls is None else math.fsum(kls) / len(kls)

    def drifts(self) -> tuple[HeadDrift, ...]:
        if self.order is None:
            return ()
        difference, size = (torch.stack(column).sum(0).tolist() for column in zip(*self.sums, strict=True))
        kls = self.kls()
        return tuple(
            HeadDrift(head, other, relative(difference[head], size[head]), None if kls is None else kls[head])
            for head, other in enumerate(self.order.tolist())
        )


def _error(output: LayerOutput, other: LayerOutput, what: str) -> _Errors:
    expected: Tensor = getattr(output, what)
    actual: Tensor = getattr(other, what)
    wide = torch.promote_types(torch.promote_types(expected.dtype, actual.dtype), torch.float32)
    expected = expected.to(wide)
    return _Errors(squares(expected - actual.to(expected.device, wide)), squares(expected))


def compare_predictions(
    teacher: LayerStream,
    student: LayerStream,
    expected: Sequence[Tensor],
    actual: Sequence[Tensor],
    parts: Sequence[Tensor],
) -> Measurement:
    """Next-token distributions after the last layer, a few positions at a time: ``[N, T, V]`` never exists."""
    sums, count = [], 0
    for hidden, student_hidden, tokens in zip(expected, actual, parts, strict=True):
        labels = tokens[:, 1:].to(teacher.device)
        step = _positions(teacher, student, hidden, student_hidden)
        of_part = torch.zeros(4, len(tokens), dtype=torch.float64, device=teacher.device)
        for start in range(0, labels.shape[1], step):
            span = slice(start, min(start + step, labels.shape[1]))
            logits = teacher.logits(hidden[:, span])
            same = student is teacher and student_hidden is hidden  # a model alone, for its loss
            other = logits if same else student.logits(student_hidden[:, span]).to(teacher.device)
            of_part += _distances(logits, other, labels[:, span])
        sums.append(of_part)
        count += labels.numel()
    each = torch.cat(sums, 1)  # [4, N], by sequence
    kl, agreement, loss, student_loss = (each.sum(1) / count).tolist()
    length = count / each.shape[1]
    margins = margin(each[0] / length), margin((each[3] - each[2]) / length)
    return Measurement(count, kl, agreement, loss, student_loss, (), *margins)


def margin(values: Tensor) -> float | None:
    """Half the width of the 95 % confidence interval of the mean of independent ``values [N]``; None for one value.

    By Student's t, its quantile from the normal one (Abramowitz and Stegun, 1964, 26.7.5): 0.4 % low for N = 8.
    """
    count = len(values)
    if count < 2:
        return None
    z, freedom = 1.959964, count - 1
    quantile = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return quantile * float(values.std()) / math.sqrt(count)


def _positions(teacher: LayerStream, student: LayerStream, hidden: Tensor, student_hidden: Tensor) -> int:
    """The number of positions whose logits are computed at once. Raises ValueError when vocabularies differ."""
    vocabulary, other = teacher.logits(hidden[:1, :1]).shape[-1], student.logits(student_hidden[:1, :1]).shape[-1]
    if vocabulary != other:
        raise ValueError(f"student: expected logits over the source's {vocabulary} tokens, found {other}")
    budget = _CPU_LOGITS if teacher.device.type == "cpu" else _GPU_LOGITS
    return max(1, budget // (hidden.shape[0] * vocabulary))


def _distances(logits: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    """Sums over positions of KL, equal argmax and both negative log likelihoods: ``[4, B]``, float64."""
    wide = torch.promote_types(torch.promote_types(logits.dtype, other.dtype), torch.float32)
    log_p, log_q = logits.to(wide).log_softmax(-1), other.to(wide).log_softmax(-1)
    return torch.stack(
        [
            divergence(log_p, log_q).sum(-1).sum(-1, dtype=torch.float64),
            (log_p.argmax(-1) == log_q.argmax(-1)).sum(-1, dtype=torch.float64),
            -log_p.gather(-1, labels[..., None])[..., 0].sum(-1, dtype=torch.float64),
            -log_q.gather(-1, labels[..., None])[..., 0].sum(-1, dtype=torch.float64),
        ]
    )
