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

import torch
from torch import Tensor

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
    margin: float | None
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
    parts = torch.split(tokens, batch)
    expected = [teacher.embed(part) for part in parts]
    actual = [student.embed(part) for part in parts]
    layers = []
    for index in range(teacher.layers):
        with teacher.open_layer(index) as layer, student.open_layer(index) as student_layer:
            layers.append(compare_layer(index, layer, student_layer, expected, actual, student))
        progress()
    return replace(
        compare_predictions(teacher, student, expected, actual, parts), layers=tuple(layers)
    )


def compare_layer(
    index: int,
    layer: Callable[[Tensor], LayerOutput],
    student_layer: StreamLayer,
    expected: MutableSequence[Tensor],
    actual: MutableSequence[Tensor],
    student: LayerStream,
) -> LayerDrift:
    """Run both residual streams (lists of ``[B, T, E]``, replaced in place) through one layer;
    return its drift.
    """
    sums: list[Tensor] = []
    heads: list[_Compared] = []
    sequences = 0
    for part, (hidden, student_hidden) in enumerate(zip(expected, actual, strict=True)):
        shown = hidden.to(student.device, student.dtype)
        output = layer(hidden)
        local = student_layer(shown)
        # until the first difference both streams are the same, and half of the work is saved
        propagated = local if torch.equal(shown, student_hidden) else student_layer(student_hidden)
        pairs = [(output.attention, other.attention) for other in (local, propagated)]
        pairs += [(output.states, other.states) for other in (local, propagated)]
        sums.append(_squared_errors(pairs))
        # heads are matched on the first batch
        if sequences * hidden.shape[1] < _HEAD_TOKENS:
            compared = _compare_heads(output, local, heads[0][0] if heads else None)
            heads += [] if compared is None else [compared]
            sequences += len(hidden)
        expected[part], actual[part] = output.states, propagated.states
    errors = [relative(*pair) for pair in torch.stack(sums).sum(0).tolist()]
    rows = [kl for _, _, kl in heads if kl is not None]
    kls: list[float] = (torch.stack(rows).sum(0) / sequences).tolist() if rows else []
    drifts: list[HeadDrift] = []
    if heads:
        of_heads = [
            relative(*pair) for pair in torch.stack([each for _, each, _ in heads]).sum(0).tolist()
        ]
        numbered = itertools.zip_longest(range(len(of_heads)), heads[0][0].tolist(), of_heads, kls)
        drifts = [HeadDrift(*each) for each in numbered]
    mean_kl = math.fsum(kls) / len(kls) if kls else None
    return LayerDrift(index, errors[0], errors[1], errors[2], errors[3], mean_kl, tuple(drifts))


# weighted values at the positions of all sequences ``[N, H, Dv]`` and output projection ``[E, H,
# Dv]``
_Heads = tuple[Tensor, Tensor]
# for one batch: the student head for each teacher head ``[H]``, squared error and squared norm of
# contributions ``[H, 2]``, and row KL ``[H]`` summed over sequences
_Compared = tuple[Tensor, Tensor, Tensor | None]


def _compare_heads(
    teacher: LayerOutput, student: LayerOutput, order: Tensor | None
) -> _Compared | None:
    """Compare one batch; None if head outputs are missing or head counts differ. ``order=None``
    matches the heads.
    """
    if teacher.context is None or teacher.output_weight is None:
        return None
    if (
        student.context is None
        or student.output_weight is None
        or student.context.shape[2] != teacher.context.shape[2]
    ):
        return None

    def wide(tensor: Tensor) -> Tensor:
        return tensor.to(teacher.attention.device, torch.promote_types(tensor.dtype, torch.float32))

    ours = wide(teacher.context.flatten(0, 1)), wide(teacher.output_weight)
    theirs = wide(student.context.flatten(0, 1)), wide(student.output_weight)
    order = match_heads(ours, theirs) if order is None else order
    # what each head adds to the attention's output, [N, E]
    pairs = (
        (ours[0][:, head] @ ours[1][:, head].mT, theirs[0][:, other] @ theirs[1][:, other].mT)
        for head, other in enumerate(order.tolist())
    )
    rows = compare_rows(teacher, student, order)
    return order, _squared_errors(pairs), None if rows is None else rows * len(teacher.attention)


def match_heads(teacher: _Heads, student: _Heads) -> Tensor:
    """The student head that corresponds to each teacher head: ``[H]``.

    Folding may relabel heads, since a layer's output does not depend on their order. Heads keep
    their numbers unless a greedy matching of the most similar heads reduces the difference by more
    than half.
    """
    samples = []
    for context, weight in (teacher, student):
        # contributions of all heads at some positions spread over the batch, [H, n * E]
        count = max(1, _SAMPLED // (context.shape[1] * len(weight)))
        some = context[:: -(-len(context) // count)].double()
        samples.append(torch.einsum("nhd,ehd->hne", some, weight.double()).flatten(1))
    ours, theirs = samples
    product = ours @ theirs.mT
    heads = len(ours)
    distance = (
        (ours.square().sum(1)[:, None] + theirs.square().sum(1) - 2 * product).clamp_min(0).cpu()
    )
    cosine = product / (ours.norm(dim=1)[:, None] * theirs.norm(dim=1)).clamp_min(
        torch.finfo(product.dtype).tiny
    )
    same = torch.arange(heads)
    order = torch.zeros(heads, dtype=torch.long)
    free = cosine.cpu()
    # greedy, because heads that correspond are far more alike than any others
    for _ in range(heads):
        row, column = divmod(int(free.argmax()), heads)
        order[row] = column
        free[row], free[:, column] = -torch.inf, -torch.inf
    return order if distance[same, order].sum() < _CLEARLY * distance[same, same].sum() else same


def compare_rows(teacher: LayerOutput, student: LayerOutput, order: Tensor) -> Tensor | None:
    """Row KL of matched heads ``[H]``; None without queries and keys, for masks that differ, or
    with sinks in a row.
    """
    if teacher.query is None or teacher.key is None or student.query is None or student.key is None:
        return None
    length = teacher.attention.shape[1]
    window, other = (
        None if (each.window or length) >= length else each.window for each in (teacher, student)
    )
    with_sinks = teacher.sinks is not None or student.sinks is not None
    if with_sinks or student.query.shape[1] != teacher.query.shape[1] or other != window:
        return None
    device = teacher.query.device
    query = student.query.to(device)
    key = student.key.to(device)
    matched = order.to(device)
    # copies are made only where heads have moved
    if not torch.equal(order, torch.arange(len(order))):
        query, key = query[:, matched], key[:, matched // (query.shape[1] // key.shape[1])]
    maps = teacher.query, teacher.key, query, key, teacher.scale, student.scale
    return row_kl(
        *maps,
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
    parts: Sequence[Tensor],
) -> Measurement:
    """Compare next-token distributions after the last layer, a few positions at a time to avoid
    storing ``[N, T, V]``.

    Raises ValueError if the vocabularies differ.
    """
    found = []
    bounds = stretch_bounds(parts[0].shape[1])
    for hidden, student_hidden, tokens in zip(expected, actual, parts, strict=True):
        labels = tokens[:, 1:].to(teacher.device)
        vocabulary = teacher.logits(hidden[:1, :1]).shape[-1]
        other = student.logits(student_hidden[:1, :1]).shape[-1]
        if vocabulary != other:
            raise ValueError(
                f"the student's logits cover {other} tokens, but the source's cover {vocabulary};"
                " compare models with the same tokenizer and vocabulary size"
            )
        # vocabularies are large: logits of all positions would not fit
        budget = _CPU_LOGITS if teacher.device.type == "cpu" else _GPU_LOGITS
        of_part = torch.zeros(
            len(bounds), 4, len(tokens), dtype=torch.float64, device=teacher.device
        )
        step = max(1, budget // (len(tokens) * vocabulary))
        for place, (first, last) in enumerate(bounds):
            for start in range(first - 1, last - 1, step):
                span = slice(start, min(start + step, last - 1))
                logits = teacher.logits(hidden[:, span])
                # a model compared with itself, to measure its loss only
                same = student is teacher and student_hidden is hidden
                others = (
                    logits if same else student.logits(student_hidden[:, span]).to(teacher.device)
                )
                of_part[place] += distances(logits, others, labels[:, span])
        found.append(of_part)
    by_place = torch.cat(found, 2)  # [stretches, 4, N], by sequence
    each = by_place.sum(0)
    length = parts[0].shape[1] - 1
    kl, agreement, loss, student_loss = (each.sum(1) / (length * each.shape[1])).tolist()
    stretches = []
    for (first, last), sums in zip(bounds, by_place, strict=True):
        excess = (sums[3] - sums[2]) / (last - first)
        of_each = sums[0] / (last - first)
        means = float(excess.mean()), margin(excess), float(of_each.mean()), margin(of_each)
        stretches.append(Stretch(first, last, *means, sequences=len(excess)))
    kls = each[0] / length
    excesses = (each[3] - each[2]) / length
    student_losses = each[3] / length
    return Measurement(
        predictions=each.shape[1] * length,
        kl=kl,
        agreement=agreement,
        teacher_loss=loss,
        student_loss=student_loss,
        layers=(),
        kl_margin=margin(kls),
        excess_margin=margin(excesses),
        stretches=tuple(stretches),
        by_sequence=tuple(
            zip(kls.tolist(), excesses.tolist(), student_losses.tolist(), strict=True)
        ),
    )


def stretch_bounds(length: int) -> list[tuple[int, int]]:
    """First and end position of each stretch of the predicted tokens of sequences of ``length``:
    1-64, 64-128, ...
    """
    # losses fall with the logarithm of the position, so each stretch is as long as all before it
    inner = itertools.takewhile(
        lambda end: end < length, (_FIRST << power for power in itertools.count())
    )
    return list(itertools.pairwise([1, *inner, length]))


def distances(logits: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    """Per-sequence sums: ``KL(logits || other)``, top-1 matches, both negative log-likelihoods;
    ``[4, B]``, float64.
    """
    wide = torch.promote_types(torch.promote_types(logits.dtype, other.dtype), torch.float32)
    log_p = logits.to(wide).log_softmax(-1)
    if other is logits:
        losses = -log_p.gather(-1, labels[..., None])[..., 0].sum(-1, dtype=torch.float64)
        return torch.stack(
            [torch.zeros_like(losses), torch.full_like(losses, labels.shape[-1]), losses, losses]
        )
    log_q = other.to(wide).log_softmax(-1)
    return torch.stack(
        [
            divergence_terms(log_p, log_q).sum(-1).sum(-1, dtype=torch.float64),
            (log_p.argmax(-1) == log_q.argmax(-1)).sum(-1, dtype=torch.float64),
            -log_p.gather(-1, labels[..., None])[..., 0].sum(-1, dtype=torch.float64),
            -log_q.gather(-1, labels[..., None])[..., 0].sum(-1, dtype=torch.float64),
        ]
    )


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
