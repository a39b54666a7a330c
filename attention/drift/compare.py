"""Compares two models layer by layer on the same tokens, with one layer of each model in memory.

The *teacher* is the reference, and the *student* is compared with it. Local numbers come from
running the student's layer on the teacher's residual stream, so they show the error of this layer
alone; propagated numbers come from the student's own residual stream.

Shapes: ``B`` sequences in a batch, ``T`` positions, ``N`` sequences in all, ``E`` model dim,
``V`` vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvfold.attention.drift.recording import LayerOutput
from kvfold.attention.drift.streams import LayerStream, StreamLayer

# Logits of each model in memory at once, 24 MB and 256 MB in float32. Derived: the allocator of a
# CPU reuses blocks below 32 MiB instead of mapping them anew; a GPU is busy with 256 tokens of the
# largest vocabularies.
_CPU_LOGITS = 6 << 20
_GPU_LOGITS = 1 << 26
# a log probability whose p is below what float32 adds up, and whose 1/p would soon overflow it
_NEGLIGIBLE = -80.0
# tokens of the first stretch of positions
_FIRST = 64

Figure = TypeVar("Figure", Tensor, float)

# progress(tokens, heads): so many more tokens have passed a layer of one of the models or, if
# ``heads`` is true, the output heads of both.
ComparisonProgress = Callable[[int, bool], None]


@dataclass(frozen=True)
class LayerDrift:
    """How far one layer of the student differs from the teacher's: relative errors ``||y - y'|| /
    ||y||`` of the attention output and of the residual stream after the layer.
    """

    attention_local: float
    attention_propagated: float
    residual_local: float
    residual_propagated: float


@dataclass(frozen=True)
class PositionRangeDrift:
    """The ``excess`` loss and the ``kl`` of the tokens at positions ``start`` to ``end``, in nats
    per token, with 95 % margins over ``sequences``.
    """

    start: int
    end: int
    excess: float
    excess_margin: float | None
    kl: float
    kl_margin: float | None
    sequences: int


class PredictionFigures(NamedTuple, Generic[Figure]):
    """What `measure_prediction_drift` measures at each position; also sums and means of it.

    kl: KL(p || p') between next-token distributions, in nats
    agreement: 1 where the same token is most likely
    teacher_loss, student_loss: negative log-likelihoods of the next token, in nats
    """

    kl: Figure
    agreement: Figure
    teacher_loss: Figure
    student_loss: Figure

    @property
    def excess(self) -> Figure:
        """The excess loss: student loss minus teacher loss."""
        return self.student_loss - self.teacher_loss


@dataclass(frozen=True, kw_only=True)
class DriftMeasurement:
    """The figures of a student (converted model) compared with its teacher (source model) on the
    same tokens.

    kl: mean KL(p || p') between next-token distributions, in nats
    agreement: fraction of positions with the same most likely token
    teacher_loss, student_loss: mean negative log-likelihoods, in nats
    kl_margin, excess_margin: half-widths of 95 % confidence intervals on similar texts, which treat
        sequences, but not the tokens within one, as independent; None for a single sequence
    layers: the drift of each layer
    stretches: excess and KL by position, on other, longer sequences if the caller has them
    by_sequence: the KL, the excess and the student's loss of each sequence
    """

    kl: float
    agreement: float
    teacher_loss: float
    student_loss: float
    kl_margin: float | None = None
    excess_margin: float | None = None
    layers: tuple[LayerDrift, ...] = ()
    stretches: tuple[PositionRangeDrift, ...] = ()
    by_sequence: tuple[tuple[float, float, float], ...] = ()

    @property
    def excess(self) -> float:
        """The excess loss: student loss minus teacher loss, in nats per token."""
        return self.student_loss - self.teacher_loss


def compare_models(
    teacher: LayerStream,
    student: LayerStream,
    tokens: Tensor,
    batch: int,
    progress: ComparisonProgress,
) -> DriftMeasurement:
    """Compare ``student`` with ``teacher`` layer by layer over ``tokens [N, T]``, ``batch``
    sequences at a time.
    """
    batches = torch.split(tokens, batch)
    expected = [teacher.embed(rows) for rows in batches]
    actual = [student.embed(rows) for rows in batches]
    layers = []
    for index in range(teacher.layers):
        errors = []
        with teacher.open_layer(index) as layer, student.open_layer(index) as student_layer:
            for chunk, hidden in enumerate(expected):
                output = layer(hidden)
                shown = hidden.to(student.device, student.dtype)
                error, actual[chunk] = compare_batch(output, student_layer, shown, actual[chunk])
                errors.append(error)
                expected[chunk] = output.states
                progress(2 * hidden.shape[:2].numel(), False)
        layers.append(make_layer_drift(errors))
    measured = compare_predictions(
        teacher, student, expected, actual, batches, lambda compared: progress(compared, True)
    )
    return replace(measured, layers=tuple(layers))


def compare_batch(
    output: LayerOutput,
    student_layer: StreamLayer,
    hidden: Tensor,
    student_hidden: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compare the teacher's ``output`` of one layer with the student's, for a batch ``[B, T, E]``
    of the teacher's residual stream and one of the student's own.

    Returns squared errors and norms for `make_layer_drift`, and the student's residual stream after
    the layer.
    """
    local = student_layer(hidden)
    # until the first difference both streams are the same, and half of the work is saved
    propagated = local if torch.equal(hidden, student_hidden) else student_layer(student_hidden)
    pairs = [
        (output.attention, local.attention),
        (output.attention, propagated.attention),
        (output.states, local.states),
        (output.states, propagated.states),
    ]
    errors = []
    for expected, actual in pairs:
        wrong = _cast_to_float32(expected) - _cast_to_float32(actual).to(expected.device)
        errors.append(torch.stack([sum_squares(wrong), sum_squares(expected)]))
    return torch.stack(errors), propagated.states


def make_layer_drift(errors: Sequence[Tensor]) -> LayerDrift:
    """Return the drift of a layer from what `compare_batch` returned for each batch."""
    error, norm = torch.stack(list(errors)).sum(0).unbind(1)
    # outputs that are all zero, as they should be, have no error
    return LayerDrift(*torch.where(error > 0, error / norm, error).sqrt().tolist())


def compare_predictions(
    teacher: LayerStream,
    student: LayerStream,
    expected: Sequence[Tensor],
    actual: Sequence[Tensor],
    batches: Sequence[Tensor],
    progress: Callable[[int], None],
) -> DriftMeasurement:
    """Compare the models' next-token distributions, from their residual streams after the last
    layer (lists of ``[B, T, E]``). Logits of a block of tokens are in memory at a time; calls
    ``progress(n)`` after each block of ``n`` tokens.

    Raises ValueError if the vocabularies differ.
    """
    vocabulary = teacher.compute_logits(expected[0][:1, :1]).shape[-1]
    other = student.compute_logits(actual[0][:1, :1]).shape[-1]
    if vocabulary != other:
        raise ValueError(
            f"the student's logits cover {other} tokens, but the source's cover {vocabulary};"
            " compare models with the same tokenizer and vocabulary size"
        )
    by_batch = []
    for hidden, student_hidden, tokens in zip(expected, actual, batches, strict=True):
        labels = tokens[:, 1:].to(teacher.device)
        measured = torch.empty(len(PredictionFigures._fields), *labels.shape, dtype=torch.float64)
        # the last position has no next token
        for block in split_logits(hidden[:, :-1], vocabulary, teacher.device):
            logits = teacher.compute_logits(hidden[:, :-1][block])
            others = student.compute_logits(student_hidden[:, :-1][block]).to(logits.device)
            measured[:, *block] = measure_prediction_drift(logits, others, labels[block]).cpu()
            progress(labels[block].numel())
        by_batch.append(measured)
    by_position = torch.cat(by_batch, 1)  # [figures, N, T - 1]
    stretches = []
    for first, last in split_positions(batches[0].shape[1]):
        span = by_position[..., first - 1 : last - 1]
        figures = PredictionFigures(*span.mean(-1))  # [N] each
        drift_of_range = PositionRangeDrift(
            start=first,
            end=last,
            excess=float(figures.excess.mean()),
            excess_margin=compute_margin(figures.excess),
            kl=float(figures.kl.mean()),
            kl_margin=compute_margin(figures.kl),
            sequences=len(figures.kl),
        )
        stretches.append(drift_of_range)
    figures = PredictionFigures(*by_position.mean(-1))
    means: dict[str, Any] = {
        name: float(values.mean()) for name, values in figures._asdict().items()
    }
    by_sequence = torch.stack([figures.kl, figures.excess, figures.student_loss], 1)
    return DriftMeasurement(
        **means,
        kl_margin=compute_margin(figures.kl),
        excess_margin=compute_margin(figures.excess),
        stretches=tuple(stretches),
        by_sequence=tuple(map(tuple, by_sequence.tolist())),
    )


def split_positions(length: int) -> list[tuple[int, int]]:
    """Return the bounds of the ranges by which drift is reported for sequences of ``length``
    tokens: (1, 64), (64, 128), ..., each as long as all before it.
    """
    # losses fall with the logarithm of the position, so each stretch is as long as all before it
    ends = [1]
    end = _FIRST
    while end < length:
        ends.append(end)
        end *= 2
    return list(itertools.pairwise([*ends, length]))


def split_logits(
    states: Tensor, vocabulary: int, device: torch.device
) -> Iterator[tuple[slice, slice]]:
    """Yield the sequences and positions of each block of ``states [B, T, E]`` whose logits are
    computed at once on ``device``. Blocks have fewer tokens the larger the ``vocabulary`` is.
    """
    count, length = states.shape[:2]
    tokens = max(1, (_CPU_LOGITS if device.type == "cpu" else _GPU_LOGITS) // vocabulary)
    sequences = min(count, tokens)
    positions = tokens // sequences
    for row in range(0, count, sequences):
        for start in range(0, length, positions):
            yield slice(row, row + sequences), slice(start, start + positions)


def compute_kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``p log(p / q) - p + q`` for each token of a vocabulary; the sum over a whole
    distribution is ``KL(p || q)`` in nats.

    Computed as ``p (expm1(d) - d)`` with ``d = log q - log p``: terms are never negative, and
    nothing cancels if p is near q.
    """
    ratio = log_q - log_p
    p = log_p.exp()
    terms = torch.expm1(ratio).sub_(ratio).mul_(p)
    # where p vanishes its ratio overflows, and only q is left of the terms
    return torch.where(log_p < _NEGLIGIBLE, log_q.exp().sub_(p).clamp_min_(0), terms)


def measure_prediction_drift(logits: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    """Return each of `PredictionFigures` by position, ``[figures, B, T]`` in float64, for the
    teacher's ``logits`` and the student's ``other``. Logits are ``[B, T, V]``, ``labels [B, T]``.
    """
    log_p = _cast_to_float32(logits).log_softmax(-1)
    log_q = _cast_to_float32(other).log_softmax(-1)
    by_position = PredictionFigures(
        kl=compute_kl_terms(log_p, log_q).sum(-1),
        agreement=log_p.argmax(-1) == log_q.argmax(-1),
        teacher_loss=-log_p.gather(-1, labels[..., None])[..., 0],
        student_loss=-log_q.gather(-1, labels[..., None])[..., 0],
    )
    return torch.stack([values.double() for values in by_position])


def compute_margin(values: Tensor) -> float | None:
    """Return the half-width of the 95 % confidence interval for the mean of independent ``values
    [N]``; None for a single value.

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


def sum_squares(values: Tensor) -> Tensor:
    """Return the sum of squares of ``values`` as a float64 scalar on their device."""
    total: Tensor = (
        torch.linalg.vector_norm(_cast_to_float32(values), dim=-1).double().square().sum()
    )
    return total


def _cast_to_float32(values: Tensor) -> Tensor:
    """Return ``values`` in float32; float64 values are unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
