"""Drift reports: the distance of a converted model from its source, compared with the distance due
to rounding.

Each number is reported with its *floor*: the same number for the source in its own dtype against
the source in a wider dtype (float32 for 16-bit dtypes, float64 for float32). A drift near its floor
is due to rounding; a drift above it is due to the conversion.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.attention.checks import expect_positive
from kvfold.attention.drift.compare import (
    ComparisonProgress,
    DriftMeasurement,
    compare_models,
)
from kvfold.attention.drift.metrics import make_metric_rows, metrics_to_dict, replace_non_finite
from kvfold.attention.drift.streams import LayerStream, make_layer_stream

# tokens of one layer call
TOKENS_AT_ONCE = 4096
# the model that ships, in float32: twice and four times as many give the same floors to 7 %
_FLOOR_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class DriftReport(DriftMeasurement):
    """The drift of a student (converted model) from its source: what ``measure_drift`` returns.

    sequences, length: the text, in tokens
    device, source_dtype, student_dtype: how the models were computed
    source_cache_bytes, student_cache_bytes: of the caches that generation uses, per token
    floor: the source measured against itself in a wider dtype; None if it was not requested or no
        wider dtype exists
    about: the compared models and the text, if known to the caller: mappings of plain values
    """

    sequences: int
    length: int
    device: str
    source_dtype: str
    student_dtype: str
    source_cache_bytes: int
    student_cache_bytes: int
    floor: DriftMeasurement | None
    about: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """True if the student computes exactly what the source computes: every drift is 0."""
        errors = [error for layer in self.layers for error in vars(layer).values()]
        return self.agreement == 1 and not any([self.kl, self.excess, *errors])

    def format_rows(self) -> list[tuple[str, str, str, str]]:
        """Return a table of all figures: a header, then rows of title, source, converted model and
        rounding floor.
        """
        return [
            ("", "source", "converted", "rounding floor"),
            (
                "cache, bytes per token",
                str(self.source_cache_bytes),
                str(self.student_cache_bytes),
                "",
            ),
            (
                "perplexity",
                f"{compute_perplexity(self.teacher_loss):.3f}",
                f"{compute_perplexity(self.student_loss):.3f}",
                "",
            ),
            *make_metric_rows(self, self.floor),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; a figure is ``{"value": ..., "floor": ...}``, with its
        ``margin`` if known.

        NaN and infinity become None.
        """
        floors = () if self.floor is None else self.floor.layers
        return {
            **self.about,
            "sequences": self.sequences,
            "length": self.length,
            "device": self.device,
            "dtype": {"source": self.source_dtype, "student": self.student_dtype},
            "identical": self.identical,
            **metrics_to_dict(self, self.floor),
            "excess_by_position": [
                {name: replace_non_finite(value) for name, value in vars(stretch).items()}
                for stretch in self.stretches
            ],
            "perplexity": {
                "source": replace_non_finite(compute_perplexity(self.teacher_loss)),
                "student": replace_non_finite(compute_perplexity(self.student_loss)),
            },
            "cache_bytes_per_token": {
                "source": self.source_cache_bytes,
                "student": self.student_cache_bytes,
            },
            "layers": [
                {
                    name: {
                        "value": replace_non_finite(error),
                        "floor": replace_non_finite(getattr(floor, name, None)),
                    }
                    for name, error in vars(layer).items()
                }
                for layer, floor in itertools.zip_longest(self.layers, floors)
            ],
        }


def measure_drift(
    source: nn.Module | LayerStream,
    student: nn.Module | LayerStream,
    tokens: Tensor,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    batch: int | None = None,
    floor: bool = True,
    progress: ComparisonProgress = lambda tokens, heads: None,
) -> DriftReport:
    """Compare ``student`` with ``source`` over ``tokens [N, T]`` (whole sequences, no padding),
    layer by layer.

    Both are loaded transformers models or layer streams. ``device`` and ``dtype`` apply to the
    computation; by default, a loaded model runs on the GPU if there is one, a stream stays on its
    device, and both keep their dtype. ``batch`` is the number of sequences that go through a layer
    at once. ``floor`` asks for the rounding floor. ``progress(tokens, heads)`` is called with the
    tokens that have passed a layer of one of the models since its last call or, if ``heads`` is
    true, the output heads of both. Cache bytes are for the models as passed. Raises ValueError for
    tokens of the wrong shape or dtype, or models of different depth or vocabulary.
    """
    integers = tokens.dtype in (torch.int32, torch.int64)
    if tokens.dim() != 2 or not integers or len(tokens) < 1 or tokens.shape[1] < 2:
        raise ValueError(
            f"tokens has shape {list(tokens.shape)} and dtype {tokens.dtype}; it must be [N, T]"
            " with N >= 1, T >= 2 and dtype torch.int64 or torch.int32"
        )
    size = max(1, TOKENS_AT_ONCE // tokens.shape[1]) if batch is None else batch
    expect_positive("batch", size)
    streams = []
    for model in (source, student):
        on_gpu = device is None and isinstance(model, nn.Module) and torch.cuda.is_available()
        streams.append(make_layer_stream(model, device="cuda" if on_gpu else device, dtype=dtype))
    teacher, compared = streams
    if teacher.layers != compared.layers:
        raise ValueError(
            f"the student has {compared.layers} layers, but the source has {teacher.layers};"
            " compare a converted model with its source"
        )
    with torch.no_grad():
        measured = compare_models(teacher, compared, tokens, size, progress)
    return make_drift_report(measured, teacher, compared, tokens, floor=floor, progress=progress)


@torch.no_grad()
def make_drift_report(
    measured: DriftMeasurement,
    source: LayerStream,
    student: LayerStream,
    tokens: Tensor,
    *,
    floor: bool = True,
    progress: ComparisonProgress,
) -> DriftReport:
    """Return the report on ``measured``, a comparison over ``tokens [N, T]``, with the cache sizes
    in bytes and, if ``floor`` is true, the drift that rounding alone causes.
    """
    coarse = max(source.dtype, student.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    lowest = None
    # no dtype is wider than float64
    if floor and coarse != torch.float64:
        exact = torch.float64 if coarse == torch.float32 else torch.float32
        some = select_floor_tokens(tokens)
        reference = source.to(dtype=exact)
        lowest = compare_models(reference, source.to(dtype=coarse), some, len(some), progress)
    return DriftReport(
        **vars(measured),
        sequences=tokens.shape[0],
        length=tokens.shape[1],
        device=source.device.type,
        source_dtype=format_dtype(source.dtype),
        student_dtype=format_dtype(student.dtype),
        source_cache_bytes=source.measure_cache_bytes_per_token(),
        student_cache_bytes=student.measure_cache_bytes_per_token(),
        floor=lowest,
    )


def select_floor_tokens(tokens: Tensor) -> Tensor:
    """Return the sequences of ``tokens [N, T]`` on which the rounding floor is measured: about 256
    tokens, in at least one sequence.
    """
    return tokens[: max(1, _FLOOR_TOKENS // tokens.shape[1])]


def compute_perplexity(loss: float) -> float:
    """Return ``e^loss`` for a loss in nats per token; infinity if it exceeds the range
    of a float.
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def format_dtype(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype without its module, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
