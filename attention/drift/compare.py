"""Compares two models layer by layer on the same tokens, with one layer of each model in memory.

The *teacher* is the reference, and the *student* is compared with it. Local numbers come from
running the student's layer on the teacher's residual stream, so they show the error of this layer
alone; propagated numbers come from the student's own residual stream.

Heads are compared by their contributions, the terms ``W_o[:, h] z_h`` of the output projection's
sum. Contributions do not depend on the basis of a head's values, which a conversion is free to
change. If a conversion moves part of a head's output into the output bias, that part counts as a
difference in the head.

Shapes: ``B`` sequences in a batch, ``T`` positions, ``N`` positions of all sequences, ``E`` model
dim, ``V`` vocabulary, ``H`` query heads, ``Dv`` value dim.
"""

import itertools
import math
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvfold.attention.drift.profile import divergence_terms, row_kl
from kvfold.attention.drift.recording import LayerOutput
from kvfold.attention.drift.streams import LayerStream, StreamLayer

# Logits of each model in memory at once: 32 MB and 512 MB in float32
_CPU_LOGITS = 1 << 23
_GPU_LOGITS = 1 << 27
# numbers compared to match heads
_SAMPLED = 1 << 22
# heads are relabeled when that explains at least half of the difference
_CLEARLY = 0.5
# tokens on which heads are compared: attention maps of both models take as long as a layer
_HEAD_TOKENS = 4096
# tokens of the first stretch of positions
_FIRST = 64


@dataclass(frozen=True)
class HeadDrift:
    """Drift of one teacher head and its corresponding student head, both on the teacher's inputs.

    ``error`` is the relative error of the head's contribution to the attention output; ``row_kl``
    is the mean KL between its attention rows, in nats. Both are measured on the first sequences,
    with 4096 tokens in all.
    """

    head: int
    student_head: int
    error: float
    row_kl: float | None


@dataclass(frozen=True)
class LayerDrift:
    """Relative errors ``||y - y'|| / ||y||`` of a layer's attention output and of the residual
    stream after the layer.

    ``row_kl`` is the mean over heads, or None if the attention maps of the two models cannot be
    compared. ``heads`` is empty if their head counts differ.
    """

    layer: int
    attention_local: float
    attention_propagated: float
    residual_local: float
    residual_propagated: float
    row_kl: float | None
    heads: tuple[HeadDrift, ...]


@dataclass(frozen=True)
class Stretch:
    """The ``excess`` loss and ``kl`` of tokens ``start`` to ``end``, in nats, with 95 % margins
    over ``sequences``.
    """

    start: int
    end: int
    excess: float
    excess_margin: float | None
    kl: float
    kl_margin: float | None
    sequences: int


@dataclass(frozen=True)
class Measurement:
    """A student measured against a teacher, over ``predictions`` predicted tokens.

    ``kl`` is the mean KL(p || p') between next-token distributions, and the losses are mean
    negative log-likelihoods, all in nats. ``agreement`` is the top-1 agreement: the fraction of
    positions with the same most likely token. The margins are the half-widths of 95 % confidence
    intervals for ``kl`` and ``excess`` on similar texts; they treat sequences, but not the tokens
    within one sequence, as independent samples. They are None for a single sequence. ``stretches``
    divide excess and KL by position, on other, longer sequences if the caller has them;
    ``by_sequence`` has the KL, the excess and the student's loss of each sequence.
    """

    predictions: int
    kl: float
    agreement: float
    teacher_loss: float
    student_loss: float
    layers: tuple[LayerDrift, ...]
    kl_margin: float | None = None
    excess_margin: float | None = None
    stretches: tuple[Stretch, ...] = ()
    by_sequence: tuple[tuple[float, float, float], ...] = ()

    @property
    def excess(self) -> float:
        """Student loss minus teacher loss, in nats per token: the log of the ratio of their
        perplexities.
        """
        return self.student_loss - self.teacher_loss


def compare(
    teacher: LayerStream,
    student: LayerStream,
    tokens: Tensor,
    batch: int,
    progress: Callable[[], None] = lambda: None,
) -> Measurement:
    """Run both models over ``tokens [N, T]``, ``batch`` sequences at a time; call ``progress()``
    after each layer.
    """
    batches = torch.split(tokens, batch)
    expected = [teacher.embed(rows) for rows in batches]
    actual = [student.embed(rows) for rows in batches]
    layers = []
    for index in range(teacher.layers):
        with teacher.open_layer(index) as layer, student.open_layer(index) as student_layer:
            layers.append(compare_layer(index, layer, student_layer, expected, actual, student))
        progress()
    measured = compare_predictions(teacher, student, expected, actual, batches)
    return replace(measured, layers=tuple(layers))


def compare_layer(
    index: int,
    layer: StreamLayer,
    student_layer: StreamLayer,
    expected: MutableSequence[Tensor],
    actual: MutableSequence[Tensor],
    student: LayerStream,
) -> LayerDrift:
    """Run both residual streams (lists of ``[B, T, E]``, replaced in place) through one layer;
    return its drift.
    """
    errors = []
    heads: list[_BatchHeads] = []
    sequences = 0
    for batch, (hidden, student_hidden) in enumerate(zip(expected, actual, strict=True)):
        shown = hidden.to(student.device, student.dtype)
        output = layer(hidden)
        local = student_layer(shown)
        # until the first difference both streams are the same, and half of the work is saved
        propagated = local if torch.equal(shown, student_hidden) else student_layer(student_hidden)
        pairs = [(output.attention, other.attention) for other in (local, propagated)]
        pairs += [(output.states, other.states) for other in (local, propagated)]
        errors.append(_squared_errors(pairs))
        if sequences * hidden.shape[1] < _HEAD_TOKENS:
            # heads are matched on the first batch
            compared = _compare_heads(output, local, heads[0].student_heads if heads else None)
            heads += [] if compared is None else [compared]
            sequences += len(hidden)
        expected[batch] = output.states
        actual[batch] = propagated.states
    drifts = _head_drifts(heads, sequences)
    row_kls = [head.row_kl for head in drifts if head.row_kl is not None]
    mean_kl = math.fsum(row_kls) / len(row_kls) if row_kls else None
    attention, attention_propagated, residual, residual_propagated = _relative_errors(errors)
    return LayerDrift(
        layer=index,
        attention_local=attention,
        attention_propagated=attention_propagated,
        residual_local=residual,
        residual_propagated=residual_propagated,
        row_kl=mean_kl,
        heads=drifts,
    )


class _BatchHeads(NamedTuple):
    """The heads of one batch."""

    student_heads: Tensor  # [H], the student's head for each of the teacher's
    errors: Tensor  # [H, 2], squared error and squared norm of contributions
    row_kl: Tensor | None  # [H], summed over sequences


def _head_drifts(heads: list[_BatchHeads], sequences: int) -> tuple[HeadDrift, ...]:
    if not heads:
        return ()
    errors = _relative_errors([batch.errors for batch in heads])
    row_kl: list[float | None] = [None] * len(errors)
    sums = [batch.row_kl for batch in heads if batch.row_kl is not None]
    if sums:
        row_kl = (torch.stack(sums).sum(0) / sequences).tolist()
    student_heads = heads[0].student_heads.tolist()
    return tuple(map(HeadDrift, range(len(errors)), student_heads, errors, row_kl))


def _compare_heads(
    teacher: LayerOutput, student: LayerOutput, student_heads: Tensor | None
) -> _BatchHeads | None:
    """Compare one batch; None if head outputs are missing or head counts differ.
    ``student_heads=None`` matches the heads.
    """
    context, weight = teacher.context, teacher.output_weight
    other, other_weight = student.context, student.output_weight
    if context is None or weight is None or other is None or other_weight is None:
        return None
    if other.shape[2] != context.shape[2]:
        return None
    context, weight, other, other_weight = (
        x.to(context.device, torch.promote_types(x.dtype, torch.float32))
        for x in (context.flatten(0, 1), weight, other.flatten(0, 1), other_weight)
    )
    if student_heads is None:
        student_heads = match_heads(context, weight, other, other_weight)
    # what each head adds to the attention's output, [N, E]
    contributions = (
        (context[:, head] @ weight[:, head].mT, other[:, match] @ other_weight[:, match].mT)
        for head, match in enumerate(student_heads.tolist())
    )
    rows = compare_rows(teacher, student, student_heads)
    rows = None if rows is None else rows * len(teacher.attention)
    return _BatchHeads(student_heads, _squared_errors(contributions), rows)


def match_heads(context: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor) -> Tensor:
    """The student head that corresponds to each teacher head: ``[H]``.

    ``context`` and ``other`` are weighted values ``[N, H, Dv]`` of teacher and student, ``weight``
    and ``other_weight`` output projections ``[E, H, Dv]``. Folding may relabel heads, since a
    layer's output does not depend on their order. Heads keep their numbers unless a greedy matching
    of the most similar heads reduces the difference by more than half.
    """
    # contributions of all heads at some positions spread over the batch, [H, n * E]
    count = max(1, _SAMPLED // (context.shape[1] * len(weight)))
    step = -(-len(context) // count)
    ours, theirs = (
        torch.einsum("nhd,ehd->hne", x[::step].double(), w.double()).flatten(1)
        for x, w in ((context, weight), (other, other_weight))
    )
    distance = torch.cdist(ours, theirs).square().cpu()
    similarity = nn.functional.normalize(ours) @ nn.functional.normalize(theirs).mT
    similarity = similarity.cpu()
    heads = len(ours)
    same = torch.arange(heads)
    order = same.clone()
    # greedy, because heads that correspond are far more alike than any others
    for _ in range(heads):
        row, column = divmod(int(similarity.argmax()), heads)
        order[row] = column
        similarity[row] = -torch.inf
        similarity[:, column] = -torch.inf
    return order if distance[same, order].sum() < _CLEARLY * distance[same, same].sum() else same


def compare_rows(
    teacher: LayerOutput, student: LayerOutput, student_heads: Tensor
) -> Tensor | None:
    """Row KL of matched heads ``[H]``; None without queries and keys, for masks that differ, or
    with sinks in a row.
    """
    query, key = student.query, student.key
    if teacher.query is None or teacher.key is None or query is None or key is None:
        return None
    if teacher.sinks is not None or student.sinks is not None:
        return None
    length = teacher.attention.shape[1]
    window, other_window = (
        None if output.window is None or output.window >= length else output.window
        for output in (teacher, student)
    )
    if query.shape[1] != teacher.query.shape[1] or other_window != window:
        return None
    query = query.to(teacher.query.device)
    key = key.to(teacher.query.device)
    # copies are made only where heads have moved
    if not torch.equal(student_heads, torch.arange(len(student_heads))):
        matches = student_heads.to(query.device)
        key = key[:, matches // (query.shape[1] // key.shape[1])]
        query = query[:, matches]
    return row_kl(
        teacher.query,
        teacher.key,
        query,
        key,
        teacher.scale,
        student.scale,
        window=window,
        causal=teacher.causal,
        softcap=teacher.softcap,
        other_softcap=student.softcap,
    )


def compare_predictions(
    teacher: LayerStream,
    student: LayerStream,
    expected: Sequence[Tensor],
    actual: Sequence[Tensor],
    batches: Sequence[Tensor],
) -> Measurement:
    """Compare next-token distributions after the last layer, a few positions at a time to avoid
    storing ``[N, T, V]``.

    Raises ValueError if the vocabularies differ.
    """
    bounds = stretch_bounds(batches[0].shape[1])
    sums = []
    for hidden, student_hidden, tokens in zip(expected, actual, batches, strict=True):
        vocabulary = teacher.logits(hidden[:1, :1]).shape[-1]
        other = student.logits(student_hidden[:1, :1]).shape[-1]
        if vocabulary != other:
            raise ValueError(
                f"the student's logits cover {other} tokens, but the source's cover {vocabulary};"
                " compare models with the same tokenizer and vocabulary size"
            )
        labels = tokens[:, 1:].to(teacher.device)
        # vocabularies are large: logits of all positions would not fit
        budget = _CPU_LOGITS if teacher.device.type == "cpu" else _GPU_LOGITS
        step = max(1, budget // (len(tokens) * vocabulary))
        by_stretch = torch.zeros(
            len(bounds), 4, len(tokens), dtype=torch.float64, device=teacher.device
        )
        for stretch, (first, last) in enumerate(bounds):
            for start in range(first - 1, last - 1, step):
                span = slice(start, min(start + step, last - 1))
                logits = teacher.logits(hidden[:, span])
                others = logits
                # otherwise a model is compared with itself, to measure its loss only
                if student is not teacher or student_hidden is not hidden:
                    others = student.logits(student_hidden[:, span]).to(teacher.device)
                by_stretch[stretch] += distances(logits, others, labels[:, span])
        sums.append(by_stretch)
    by_stretch = torch.cat(sums, 2)  # [stretches, 4, N]
    stretches = []
    for (first, last), values in zip(bounds, by_stretch, strict=True):
        values = values / (last - first)
        excess = values[3] - values[2]
        stretches.append(
            Stretch(
                start=first,
                end=last,
                excess=float(excess.mean()),
                excess_margin=margin(excess),
                kl=float(values[0].mean()),
                kl_margin=margin(values[0]),
                sequences=len(excess),
            )
        )
    kl, agreement, loss, student_loss = by_stretch.sum(0) / (batches[0].shape[1] - 1)  # [N] each
    excess = student_loss - loss
    return Measurement(
        predictions=labels.shape[1] * len(kl),
        kl=float(kl.mean()),
        agreement=float(agreement.mean()),
        teacher_loss=float(loss.mean()),
        student_loss=float(student_loss.mean()),
        layers=(),
        kl_margin=margin(kl),
        excess_margin=margin(excess),
        stretches=tuple(stretches),
        by_sequence=tuple(map(tuple, torch.stack([kl, excess, student_loss], 1).tolist())),
    )


def stretch_bounds(length: int) -> list[tuple[int, int]]:
    """First and end position of each stretch of the predicted tokens of sequences of ``length``:
    1-64, 64-128, ...
    """
    # losses fall with the logarithm of the position, so each stretch is as long as all before it
    ends = [1]
    end = _FIRST
    while end < length:
        ends.append(end)
        end *= 2
    return list(itertools.pairwise([*ends, length]))


def distances(logits: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    """Per-sequence sums: ``KL(logits || other)``, top-1 matches, both negative log-likelihoods;
    ``[4, B]``, float64. Logits are ``[B, T, V]``, labels ``[B, T]``.
    """
    wide = torch.promote_types(torch.promote_types(logits.dtype, other.dtype), torch.float32)
    log_p = logits.to(wide).log_softmax(-1)
    log_q = log_p if other is logits else other.to(wide).log_softmax(-1)
    by_position = [
        divergence_terms(log_p, log_q).sum(-1),
        log_p.argmax(-1) == log_q.argmax(-1),
        -log_p.gather(-1, labels[..., None])[..., 0],
        -log_q.gather(-1, labels[..., None])[..., 0],
    ]
    return torch.stack([values.sum(-1, dtype=torch.float64) for values in by_position])


def margin(values: Tensor) -> float | None:
    """Half-width of the 95 % confidence interval for the mean of independent ``values [N]``; None
    for one value.

    Uses Student's t, with its quantile approximated from the normal quantile (Abramowitz and
    Stegun, 1964, 26.7.5): 0.4% too low for N = 8.
    """
    count = len(values)
    if count < 2:
        return None
    z = 1.959964
    freedom = count - 1
    quantile = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return quantile * float(values.std()) / math.sqrt(count)


def relative(difference: float, size: float) -> float:
    """``sqrt(difference / size)``; 0 if the difference is 0, even if the size is 0 too."""
    if difference == 0:
        return 0.0
    return math.sqrt(difference / size) if size > 0 else math.inf


def squares(values: Tensor) -> Tensor:
    """Sum of squares, float64, left on the device: reading it would wait for it."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    total: Tensor = torch.linalg.vector_norm(wide, dim=-1).double().square().sum()
    return total


def _squared_errors(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Squared error and squared norm of each (expected, actual) pair, on the first device:
    ``[pairs, 2]``, float64.
    """
    errors = []
    for expected, actual in pairs:
        wide = torch.promote_types(torch.promote_types(expected.dtype, actual.dtype), torch.float32)
        exact = expected.to(wide)
        errors.append(torch.stack([squares(exact - actual.to(exact.device, wide)), squares(exact)]))
    return torch.stack(errors)


def _relative_errors(batches: list[Tensor]) -> list[float]:
    """The relative errors of all batches, from squared errors and squared norms ``[pairs, 2]``."""
    return [relative(*pair) for pair in torch.stack(batches).sum(0).tolist()]
