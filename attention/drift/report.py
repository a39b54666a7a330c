"""Drift reports: the distance of a converted model from its source, compared with the distance due
to rounding.

Each number is reported with its *floor*: the same number for the source in its own dtype against
the source in a wider dtype (float32 for 16-bit dtypes, float64 for float32). A drift near its floor
is due to rounding; a drift above it is due to the conversion.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.attention.checks import expect_at_least
from kvfold.attention.drift.compare import LayerDrift, Measurement, compare
from kvfold.attention.drift.metrics import finite, metric_rows, metrics_dict
from kvfold.attention.drift.streams import LayerStream, as_stream

# tokens of one layer call
TOKENS_AT_ONCE = 4096
_FLOOR_TOKENS = 512
_LAYER_NUMBERS = (
    "attention_local",
    "attention_propagated",
    "residual_local",
    "residual_propagated",
    "row_kl",
)

__all__ = ["DriftReport", "Floor", "LayerDrift", "Measurement", "measure_drift"]


@dataclass(frozen=True)
class Floor:
    """The source in ``dtype`` measured against itself in ``reference_dtype``; ``sequences`` is the
    sample size.
    """

    dtype: str
    reference_dtype: str
    sequences: int
    measured: Measurement


@dataclass(frozen=True)
class DriftReport:
    """The result of ``measure_drift``. ``floor`` is None if it was not requested or no wider dtype
    exists.

    ``about`` describes the compared models and the text, if known to the caller: each value is a
    mapping of plain values.
    """

    sequences: int
    length: int
    device: str
    source_dtype: str
    student_dtype: str
    source_cache_bytes: int
    student_cache_bytes: int
    measured: Measurement
    floor: Floor | None
    about: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def kl(self) -> float:
        """Mean KL of the student's next-token distributions from the source's, in nats."""
        return self.measured.kl

    @property
    def excess(self) -> float:
        """Student loss minus source loss, in nats per token."""
        return self.measured.excess

    @property
    def perplexities(self) -> tuple[float, float]:
        """Perplexity of the source and of the student."""
        return perplexity(self.measured.teacher_loss), perplexity(self.measured.student_loss)

    @property
    def agreement(self) -> float:
        """Fraction of positions at which both models predict the same next token."""
        return self.measured.agreement

    @property
    def identical(self) -> bool:
        """True if every drift is exactly 0."""
        measured = self.measured
        errors = [getattr(layer, name) for layer in measured.layers for name in _LAYER_NUMBERS]
        return measured.agreement == 1 and not any([measured.kl, measured.excess, *errors])

    def table_rows(self) -> list[tuple[str, str, str, str]]:
        """The header and rows of a table of all figures."""
        before, after = self.perplexities
        caches = str(self.source_cache_bytes), str(self.student_cache_bytes)
        floor = None if self.floor is None else self.floor.measured
        return [
            ("", "source", "converted", "rounding floor"),
            ("cache, bytes per token", *caches, ""),
            ("perplexity", f"{before:.3f}", f"{after:.3f}", ""),
            *metric_rows(self.measured, floor),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values; a figure is ``{"value": ..., "floor": ...}``, with its ``margin`` if known.

        NaN and infinity become None.
        """
        measured = self.measured
        floor = self.floor
        low = None if floor is None else floor.measured
        source, student = self.perplexities
        layers = itertools.zip_longest(measured.layers, () if low is None else low.layers)
        return {
            **self.about,
            "sequences": self.sequences,
            "length": self.length,
            "predictions": measured.predictions,
            "device": self.device,
            "dtype": {
                "source": self.source_dtype,
                "student": self.student_dtype,
            },
            "floor": None
            if floor is None
            else {name: value for name, value in vars(floor).items() if name != "measured"},
            "identical": self.identical,
            **metrics_dict(measured, low),
            "excess_by_position": [
                {
                    "from": stretch.start,
                    "to": stretch.end,
                    "value": finite(stretch.excess),
                    "margin": finite(stretch.excess_margin),
                    "kl": finite(stretch.kl),
                    "kl_margin": finite(stretch.kl_margin),
                    "sequences": stretch.sequences,
                }
                for stretch in measured.stretches
            ],
            "perplexity": {
                "source": finite(source),
                "student": finite(student),
            },
            "cache_bytes_per_token": {
                "source": self.source_cache_bytes,
                "student": self.student_cache_bytes,
            },
            "layers": [_layer_dict(layer, rounding) for layer, rounding in layers],
        }


def _layer_dict(layer: LayerDrift, floor: LayerDrift | None) -> dict[str, Any]:
    values: dict[str, Any] = {"layer": layer.layer}
    for name in _LAYER_NUMBERS:
        value = finite(getattr(layer, name))
        values[name] = {
            "value": value,
            "floor": finite(getattr(floor, name, None)),
        }
    return values


def measure_drift(
    source: nn.Module | LayerStream,
    student: nn.Module | LayerStream,
    tokens: Tensor,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    batch: int | None = None,
    floor: bool = True,
    floor_sequences: int = 8,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> DriftReport:
    """Compare ``student`` with ``source`` over ``tokens [N, T]`` (whole sequences, no padding),
    layer by layer.

    Both are loaded transformers models or layer streams. ``device`` and ``dtype`` apply to the
    computation; by default, a loaded model runs on the GPU if there is one, a stream stays on its
    device, and both keep their dtype. ``batch`` is the number of sequences that go through a layer
    at once, and ``floor_sequences`` the number used to measure the rounding floor.
    ``progress(stage, done, total)`` is called before and after each layer of ``compare`` and
    ``floor``. Cache bytes are for the models as passed. Raises ValueError for tokens of the wrong
    shape or dtype, or models of different depth or vocabulary.
    """
    shaped = tokens.dim() == 2 and len(tokens) > 0 and tokens.shape[1] > 1
    if not shaped or tokens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"tokens has shape {list(tokens.shape)} and dtype {tokens.dtype}; it must be [N, T]"
            " with N >= 1, T >= 2 and dtype torch.int64 or torch.int32"
        )
    size = max(1, TOKENS_AT_ONCE // tokens.shape[1]) if batch is None else batch
    expect_at_least("batch", size, 1)
    expect_at_least("floor_sequences", floor_sequences, 1)
    teacher = _open_stream(source, device, dtype)
    compared = _open_stream(student, device, dtype)
    if teacher.layers != compared.layers:
        raise ValueError(
            f"the student has {compared.layers} layers, but the source has {teacher.layers};"
            " compare a converted model with its source"
        )

    def report_steps(stage: str) -> Callable[[], None]:
        done = itertools.count()
        progress(stage, next(done), teacher.layers)
        return lambda: progress(stage, next(done), teacher.layers)

    with torch.no_grad():
        measured = compare(teacher, compared, tokens, size, report_steps("compare"))
    if not floor:
        return make_report(measured, teacher, compared, tokens, tokens[:0])
    some = tokens[:floor_sequences]
    return make_report(measured, teacher, compared, tokens, some, size, report_steps("floor"))


def _open_stream(
    model: nn.Module | LayerStream,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> LayerStream:
    # a loaded model goes to the GPU by default, a stream stays where it is
    if device is None and isinstance(model, nn.Module) and torch.cuda.is_available():
        device = "cuda"
    return as_stream(model, device=device, dtype=dtype)


@torch.no_grad()
def make_report(
    measured: Measurement,
    source: LayerStream,
    student: LayerStream,
    tokens: Tensor,
    floor_tokens: Tensor | None = None,
    batch: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> DriftReport:
    """The report on ``measured``, a comparison over ``tokens [N, T]``, with its rounding floor and
    the bytes of the caches.

    The floor is measured on ``floor_tokens`` (not at all if empty), by default about 512 tokens in
    at least one sequence, ``batch`` of them at a time; ``progress`` is called after each of its
    layers.
    """
    if floor_tokens is None:
        # twice as many gave the same floor
        floor_tokens = tokens[: max(1, _FLOOR_TOKENS // tokens.shape[1])]
    coarse = max(source.dtype, student.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    floor = None
    # no dtype is wider than float64
    if coarse != torch.float64 and len(floor_tokens):
        exact = torch.float64 if coarse == torch.float32 else torch.float32
        reference = source.to(dtype=exact)
        rounded = as_stream(source, dtype=coarse)
        size = batch or len(floor_tokens)
        lowest = compare(reference, rounded, floor_tokens, size, progress)
        floor = Floor(dtype_name(coarse), dtype_name(exact), len(floor_tokens), lowest)
    return DriftReport(
        sequences=tokens.shape[0],
        length=tokens.shape[1],
        device=source.device.type,
        source_dtype=dtype_name(source.dtype),
        student_dtype=dtype_name(student.dtype),
        source_cache_bytes=source.cache_bytes_per_token(),
        student_cache_bytes=student.cache_bytes_per_token(),
        measured=measured,
        floor=floor,
    )


def perplexity(loss: float) -> float:
    """``e^loss``, or infinity if that exceeds the range of a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
