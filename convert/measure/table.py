"""A drift report as a table for the terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvfold.attention.drift.report import DriftReport, HeadDrift, LayerDrift, Measurement, perplexity

_COLUMNS = (
    ("attention_local", "attention,", "local"),
    ("attention_propagated", "attention,", "propagated"),
    ("residual_local", "residual,", "local"),
    ("residual_propagated", "residual,", "propagated"),
    ("row_kl", "attention", "rows, KL"),
)
_WIDTH = 15
_LEGEND = (
    "attention, residual: distance of the attention's output, and of the residual stream after the",
    "  layer, from the source's, as a share of its size; local: given the source's inputs;",
    "  propagated: given the converted model's own",
    "attention rows, KL: between attention weights in nats, mean over heads and positions",
    "worst head: whose part of the attention's output differs most, and its relative error",
    "second numbers: the floor, what rounding alone gives; -: not to be compared",
)


def drift_table(report: DriftReport) -> str:
    """Totals first, then one line per layer, at most 100 columns wide; each number has its rounding floor beside it."""
    return "\n".join([*_heading(report), "", *_totals(report), "", *_layers(report), "", *_LEGEND])


def _heading(report: DriftReport) -> list[str]:
    dtype = report.source_dtype
    if report.student_dtype != dtype:
        dtype = f"{dtype} (converted: {report.student_dtype})"
    count = _count(report.sequences, "sequence")
    lines = [f"drift over {count} of {report.length} tokens, {dtype} on {report.device}"]
    if report.floor is None:
        lines.append("floor: not measured")
    else:
        floor = report.floor
        some = _count(floor.sequences, "sequence")
        lines.append(f"floor: the source in {floor.dtype} against itself in {floor.reference_dtype}, over {some}")
    lines += [_named(name, values) for name, values in report.about.items()]
    if report.identical:
        lines.append("the two are identical: every drift is exactly 0")
    return lines


def _named(name: str, values: Mapping[str, Any]) -> str:
    """A model or the text: its name, the beginning of its hash, what else is known."""
    others = "".join(f", {key} {value}" for key, value in values.items() if key not in ("name", "sha256"))
    return f"{name}: {values['name']} (sha256 {values['sha256'][:12]}{others})"


def _totals(report: DriftReport) -> list[str]:
    measured, floor = report.measured, None if report.floor is None else report.floor.measured
    ratio = report.student_cache_bytes / report.source_cache_bytes if report.source_cache_bytes else math.nan
    rows = [
        ("", "source", "converted", "drift", "floor"),
        _perplexity(measured, floor),
        (
            "loss, nats per token",
            _value(measured.teacher_loss),
            _value(measured.student_loss),
            _signed(measured.excess),
            floor and _value(abs(floor.excess)),
        ),
        ("KL of next-token distributions, nats", "", "", _value(measured.kl), floor and _value(floor.kl)),
        ("top-1 agreement", "", "", f"{measured.agreement:.2%}", floor and f"{floor.agreement:.2%}"),
        (
            "cache, bytes per token",
            f"{report.source_cache_bytes}",
            f"{report.student_cache_bytes}",
            f"x {ratio:.3g}",
            "exact",
        ),
    ]
    lines = [f"{name:<36} {a:>12} {b:>12} {drift:>12} {low or '-':>12}".rstrip() for name, a, b, drift, low in rows]
    return [*lines, *_interval(measured)]


def _perplexity(measured: Measurement, floor: Measurement | None) -> tuple[str, str, str, str, str | None]:
    before, after = perplexity(measured.teacher_loss), perplexity(measured.student_loss)
    low = None if floor is None else _percent(abs(floor.excess))
    return "perplexity", _value(before), _value(after), _percent(measured.excess), low


def _interval(measured: Measurement) -> list[str]:
    if measured.excess_margin is None:
        return []
    low, high = (_percent(measured.excess + side * measured.excess_margin) for side in (-1, 1))
    return [f"95 % interval of the perplexity's drift, by sequence: {low} to {high}"]


def _layers(report: DriftReport) -> list[str]:
    """Relative errors per layer, and the head that differs most."""
    layers = report.measured.layers
    floors: Sequence[LayerDrift | None] = [None] * len(layers) if report.floor is None else report.floor.measured.layers
    lines = [
        "layer" + "".join(f"{first:>{_WIDTH}}" for _, first, _ in _COLUMNS) + "    worst head",
        "     " + "".join(f"{second:>{_WIDTH}}" for _, _, second in _COLUMNS) + "    and its error",
    ]
    for layer, floor in zip(layers, floors, strict=True):
        cells = "".join(f"{_cell(layer, floor, name):>{_WIDTH}}" for name, _, _ in _COLUMNS)
        lines.append(f"{layer.layer:>5}{cells}  {_worst(layer.heads)}".rstrip())
    return lines


def _cell(layer: LayerDrift, floor: LayerDrift | None, name: str) -> str:
    """A value and, where there is one, its floor."""
    return f"{_value(getattr(layer, name))} {_short(getattr(floor, name, None)):>6}"


def _worst(heads: tuple[HeadDrift, ...]) -> str:
    if not heads:
        return ""
    worst = max(heads, key=lambda head: head.error)
    return f"{worst.head:>5} {_value(worst.error):>7}" if worst.error > 0 else f"{'none':>5}"


def _value(value: float | None) -> str:
    """At most 8 characters: five digits, or an exponent for the very small and large; an exact zero is a bare 0."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    size = abs(value)
    if not 1e-3 <= size < 1e5:
        return f"{value:.1e}"
    return f"{value:.{max(0, 4 - int(math.log10(max(size, 1))))}f}"


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.0e}" if math.isfinite(value) else f"{value:.0f}"


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + _value(value)


def _percent(excess: float) -> str:
    """The perplexity that ``excess`` nats of loss add, in percent."""
    added = 100 * math.expm1(excess) if excess < 700 else math.inf
    return f"{_signed(added)} %"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
