"""Drift reports: the distance of a converted model from its source, compared with the distance due
to rounding.

Each number is reported with its *floor*: the same number for the source in its own dtype against
the source in a wider dtype (float32 for 16-bit dtypes, float64 for float32). A drift near its floor
is due to rounding; a drift above it is due to the conversion.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.attention.checks import expect_at_least
from kvfold.attention.drift.compare import HeadDrift, LayerDrift, Measurement, compare
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

__all__ = ["DriftReport", "Floor", "HeadDrift", "LayerDrift", "Measurement", "measure_drift"]


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

    def __repr__(self) -> str:
        measured = self.measured
        before, after = self.perplexities
        return (
            f"DriftReport({self.sequences} x {self.length} tokens: KL {measured.kl:.4f} nats, top-1"
            f" agreement {100 * measured.agreement:.1f} %, perplexity {before:.2f} -> {after:.2f})"
        )

    @property
    def kl(self) -> float:
        """Mean KL divergence of the student's next-token distributions from the source's, in nats."""
        return self.measured.kl

    @property
    def excess(self) -> float:
        """Student loss minus source loss, in nats per token."""
        return self.measured.excess

    @property
    def perplexity(self) -> float:
        """Perplexity of the student."""
        return self.perplexities[1]

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
        values = [getattr(layer, name) for layer in measured.layers for name in _LAYER_NUMBERS]
        return measured.agreement == 1 and not any([measured.kl, measured.excess, *values])

    def to_dict(self) -> dict[str, Any]:
        """Plain values; each drift is ``{"value": ..., "floor": ...}``, with a ``margin`` where one
        is known.

        NaN and infinity become None.
        """
        measured = self.measured
        floor = None if self.floor is None else self.floor.measured
        source, student = self.perplexities
        # an excess may be negative, but rounding moves it either way
        rounding = None if floor is None else abs(floor.excess)
        layers = itertools.zip_longest(measured.layers, () if floor is None else floor.layers)
        return {
            **{name: dict(values) for name, values in self.about.items()},
            "sequences": self.sequences,
            "length": self.length,
            "predictions": measured.predictions,
            "device": self.device,
            "dtype": {"source": self.source_dtype, "student": self.student_dtype},
            "floor": (
                None
                if self.floor is None
                else {k: v for k, v in asdict(self.floor).items() if k != "measured"}
            ),
            "identical": self.identical,
            "kl": {**_pair(measured, floor, "kl"), "margin": finite(measured.kl_margin)},
            "agreement": _pair(measured, floor, "agreement"),
            "excess": {
                "value": finite(measured.excess),
                "floor": finite(rounding),
                "margin": finite(measured.excess_margin),
            },
            "excess_by_position": [
                {
                    "from": each.start,
                    "to": each.end,
                    "value": finite(each.excess),
                    "margin": finite(each.margin),
                    "kl": finite(each.kl),
                    "kl_margin": finite(each.kl_margin),
                    "sequences": each.sequences,
                }
                for each in measured.stretches
            ],
            "perplexity": {
                "source": finite(source),
                "student": finite(student),
                "floor": (
                    None if rounding is None else finite(source * math.expm1(min(rounding, 700)))
                ),
            },
            "cache_bytes_per_token": {
                "source": self.source_cache_bytes,
                "student": self.student_cache_bytes,
            },
            "layers": [_layer(layer, lowest) for layer, lowest in layers],
        }

    def positions_text(self) -> str:
        """One line with the excess loss and KL of each stretch of positions; empty if there is only
        one.
        """
        stretches = self.measured.stretches
        of_each = ", ".join(
            f"{each.excess:+.3f} ({each.kl:.3f}) at {each.start}-{each.end}" for each in stretches
        )
        if len(stretches) < 2:
            return ""
        size = f"{stretches[0].sequences} x {stretches[-1].end} tokens"
        return f"excess loss (KL) by position, nats per token, on {size}: {of_each}"


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
    if (
        tokens.dim() != 2
        or not len(tokens)
        or tokens.shape[1] < 2
        or tokens.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            f"tokens has shape {list(tokens.shape)} and dtype {tokens.dtype}; it must be [N, T]"
            " with N >= 1, T >= 2 and dtype torch.int64 or torch.int32"
        )
    for name, number in (("batch", batch), ("floor_sequences", floor_sequences)):
        if number is not None:
            expect_at_least(name, number, 1)
    # a loaded model goes to the GPU by default, a stream stays where it is
    default = "cuda" if torch.cuda.is_available() else None
    teacher, compared = (
        as_stream(
            model, device=device or (default if isinstance(model, nn.Module) else None), dtype=dtype
        )
        for model in (source, student)
    )
    if teacher.layers != compared.layers:
        raise ValueError(
            f"the student has {compared.layers} layers, but the source has {teacher.layers};"
            " compare a converted model with its source"
        )
    size = batch or max(1, TOKENS_AT_ONCE // tokens.shape[1])
    some = tokens[: floor_sequences if floor else 0]

    def steps(stage: str) -> Callable[[], None]:
        done = itertools.count()
        progress(stage, next(done), teacher.layers)
        return lambda: progress(stage, next(done), teacher.layers)

    with torch.no_grad():
        measured = compare(teacher, compared, tokens, size, steps("compare"))
    return report_of(measured, teacher, compared, tokens, some, size, partial(steps, "floor"))


def floor_count(tokens: Tensor) -> int:
    """Number of sequences of ``tokens [N, T]`` for the rounding floor: about 512 tokens, at least
    one sequence.
    """
    # twice as many gave the same floor
    return max(1, min(len(tokens), _FLOOR_TOKENS // tokens.shape[1]))


@torch.no_grad()
def report_of(
    measured: Measurement,
    source: LayerStream,
    student: LayerStream,
    tokens: Tensor,
    floor_tokens: Tensor | None = None,
    batch: int | None = None,
    start: Callable[[], Callable[[], None]] = lambda: lambda: None,
) -> DriftReport:
    """The report for a comparison ``measured`` over ``tokens [N, T]``, including its floor and
    cache bytes.

    The floor is measured on ``floor_tokens`` (skipped if empty), by default the first
    ``floor_count(tokens)`` sequences. ``start`` is called before it is measured; ``batch`` and the
    function that it returns go to ``compare``.
    """
    some = tokens[: floor_count(tokens)] if floor_tokens is None else floor_tokens
    coarse = max(source.dtype, student.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    floor = None
    # no dtype is wider than float64
    if coarse != torch.float64 and len(some):
        exact = torch.float64 if coarse == torch.float32 else torch.float32
        reference = source.to(dtype=exact)
        rounded = as_stream(source, dtype=coarse)
        lowest = compare(reference, rounded, some, batch or len(some), start())
        floor = Floor(dtype_name(coarse), dtype_name(exact), len(some), lowest)
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
    return math.exp(loss) if loss < 700 else math.inf if loss == loss else loss


def _layer(layer: LayerDrift, floor: LayerDrift | None) -> dict[str, Any]:
    """One layer as plain values; its heads have floors only if the floor has the same number of
    heads.
    """
    lows = floor.heads if floor is not None and len(floor.heads) == len(layer.heads) else ()
    heads = [
        {**asdict(head), "error": _pair(head, low, "error"), "row_kl": _pair(head, low, "row_kl")}
        for head, low in itertools.zip_longest(layer.heads, lows)
    ]
    return {
        "layer": layer.layer,
        **{name: _pair(layer, floor, name) for name in _LAYER_NUMBERS},
        "heads": heads,
    }


def _pair(measured: object, floor: object, name: str) -> dict[str, float | None]:
    return {"value": finite(getattr(measured, name)), "floor": finite(getattr(floor, name, None))}


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
