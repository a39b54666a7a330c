"""The figures that measure a student against its source, and how each is written.

This is the only place that formats them: `kvfold drift`, `convert` and `sweep`, model cards,
kvfold.json and HTML pages read ``METRICS``. To add a figure, measure it as a field of
`compare.PredictionFigures` and `compare.DriftMeasurement`, and describe it by a row here.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfold.attention.drift.compare import DriftMeasurement


@dataclass(frozen=True)
class MetricFormat:
    """How one figure of a `DriftMeasurement` is named and formatted.

    name: attribute of the measurement, and key in JSON; ``<name>_margin`` is half of its 95 %
        confidence interval, if that is measured
    label: in a line, and over the column of a table
    title: before the row of a table
    spec: Python's format specification of the value and its margin
    unit: after the value in a line
    interval: whether a line shows the margin too
    """

    name: str
    label: str
    title: str
    spec: str
    unit: str = ""
    interval: bool = False


EXCESS = MetricFormat(
    "excess", "excess", "excess loss, nats per token", "+z.4f", " nats", interval=True
)
METRICS = (
    EXCESS,
    MetricFormat("kl", "KL", "KL of next-token distributions, nats", "z.4f", " nats"),
    MetricFormat("agreement", "top-1", "top-1 agreement", ".1%"),
)


def format_metric(metric: MetricFormat, measured: object, *, interval: bool = True) -> str:
    """Return one figure of ``measured`` as text, with its 95 % margin if it is known and
    ``interval`` is true; ``-`` if it is not finite.
    """
    value = replace_non_finite(getattr(measured, metric.name))
    margin = replace_non_finite(getattr(measured, f"{metric.name}_margin", None))
    if value is None:
        return "-"
    text = f"{value:{metric.spec}}"
    if interval and margin is not None:
        text += f" ± {margin:{metric.spec.removeprefix('+')}}"
    return text.replace("%", " %")


def format_metrics(measured: object) -> str:
    """Return the figures that ``measured`` has in one line: ``excess +0.0690 ± 0.0250 nats, KL
    0.0785 nats, top-1 78.7 %``.
    """
    return ", ".join(
        f"{metric.label} {format_metric(metric, measured, interval=metric.interval)}{metric.unit}"
        for metric in METRICS
        if hasattr(measured, metric.name)
    )


def format_layer_error(error: float | None) -> str:
    """Return a layer's relative error or divergence with three digits; ``-`` if it is
    not finite.
    """
    return "-" if replace_non_finite(error) is None else f"{error:.3g}"


def format_cache_saving(before: float, after: float) -> str:
    """Return by how much a cache of ``before`` bytes shrank to ``after`` bytes, such as ``87.5 %
    less``; ``?`` if ``before`` is 0.
    """
    if not before:
        return "?"
    saving = 1 - after / before
    return f"{abs(saving):.1%} {'more' if saving < 0 else 'less'}".replace("%", " %")


def make_metric_rows(
    measured: "DriftMeasurement", floor: "DriftMeasurement | None"
) -> list[tuple[str, str, str, str]]:
    """Return one table row per figure: title, an empty cell for the source, the student's figure,
    and the figure that rounding alone causes (``floor``).
    """
    rows = []
    for metric in METRICS:
        # Other floors than shares are too small for the format of the figure.
        rounding = format_layer_error(getattr(floor, metric.name, None))
        if floor is not None and "%" in metric.spec:
            rounding = format_metric(metric, floor)
        rows.append((metric.title, "", format_metric(metric, measured), rounding))
    return rows


def make_position_rows(measured: "DriftMeasurement") -> list[tuple[str, ...]]:
    """Return a table of the drift by position: a header, then a row per range of positions. Empty
    if there is only one range.
    """
    stretches = measured.stretches
    if len(stretches) < 2:
        return []
    metrics = [metric for metric in METRICS if hasattr(stretches[0], metric.name)]
    rows = [("tokens", *(metric.title for metric in metrics))]
    for stretch in stretches:
        figures = (format_metric(metric, stretch) for metric in metrics)
        rows.append((f"{stretch.start}-{stretch.end}", *figures))
    return rows


def metrics_to_dict(
    measured: "DriftMeasurement", floor: "DriftMeasurement | None"
) -> dict[str, Any]:
    """Return all figures as JSON values: ``{"kl": {"value": ..., "floor": ..., "margin": ...},
    ...}``.
    """
    values = {}
    for metric in METRICS:
        # Rounding moves an excess either way.
        low = replace_non_finite(getattr(floor, metric.name, None))
        values[metric.name] = {
            "value": replace_non_finite(getattr(measured, metric.name)),
            "floor": None if low is None else abs(low),
            "margin": replace_non_finite(getattr(measured, f"{metric.name}_margin", None)),
        }
    return values


def replace_non_finite(value: float | None) -> float | None:
    """Return ``value``, or None for NaN and infinity, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None
