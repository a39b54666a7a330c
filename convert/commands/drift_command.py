"""``kvfold drift``: how far a converted checkpoint is from its source."""

import math
from typing import TYPE_CHECKING

import click

from kvfold.attention.drift.metrics import (
    format_cache_saving,
    format_layer_error,
    format_metrics,
)
from kvfold.attention.rounding_schemes import describe_cache_rounding
from kvfold.convert.console import (
    add_request_options,
    check_models_and_load_torch,
    json_option,
    print_result,
    report_option,
    require_finite_predictions,
)
from kvfold.convert.conversion.judgment import format_verdict
from kvfold.convert.formatting import format_labeled_rows, format_table
from kvfold.convert.request import DriftRequest
from kvfold.convert.text.corpus import check_text_sources

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport

_LAYER_COLUMNS = {
    "attention_local": ("attention,", "local"),
    "attention_propagated": ("attention,", "propagated"),
    "residual_local": ("residual,", "local"),
    "residual_propagated": ("residual,", "propagated"),
}
_LEGEND = """
attention, residual: relative error of the attention's output, and of the
  residual stream after the layer; local: with the source's inputs; propagated:
  with the converted model's own inputs
rounding: the largest error of any layer that rounding alone causes
-: not finite"""


@click.command(short_help="Measure the drift of OUT from MODEL, layer by layer.")
@add_request_options(DriftRequest)
@click.option(
    "--layers", is_flag=True, help="Print every layer, the rounding floor and what the terms mean."
)
@json_option
@report_option
def drift(request: DriftRequest, layers: bool, json_file: str | None, report: str | None) -> None:
    """Measure the drift of the converted checkpoint OUT from MODEL, layer by layer and in the
    predictions.
    """
    check_text_sources([request.text], "text")
    check_models_and_load_torch(request.model, request.out, quiet=request.quiet)
    from kvfold.convert.measure.drift import drift_checkpoints

    measured = drift_checkpoints(request)
    summary = summarize_drift(request, measured, layers)
    if report is not None:
        from kvfold.convert.measure.report import write_drift_report

        title = measured.about["converted"]["name"]
        write_drift_report(report, "kvfold drift", title, measured, summary, request.quiet)
    print_result(json_file, measured.to_dict, summary)
    require_finite_predictions(request.model, [measured.teacher_loss])
    require_finite_predictions(request.out, [measured.student_loss])


def summarize_drift(request: DriftRequest, report: "DriftReport", layers: bool = False) -> str:
    """The text for the terminal: what was compared, the saving, the loss and the verdict. With
    ``layers``, also all figures with their rounding floors, and a table of the layers.
    """
    floor = report.floor
    before = report.source_cache_bytes
    after = report.student_cache_bytes
    text = f"{report.sequences} x {report.length} tokens of {report.about['text']['name']}"
    rows = [
        ("drift", " from ".join(report.about[name]["name"] for name in ("converted", "source"))),
        ("text", f"{text}, {report.student_dtype} on {report.device}"),
        ("cache", f"{before} -> {after} bytes per token, {format_cache_saving(before, after)}"),
        ("rounded", describe_cache_rounding(request.cache) if request.cache else ""),
        ("loss", format_metrics(report)),
        ("rounding", f"alone: KL {format_layer_error(floor.kl)} nats" if floor else ""),
        ("verdict", format_verdict(report)),
    ]
    if not layers:
        rounded = ["--cache", request.cache] if request.cache else []
        return format_labeled_rows(
            rows, ["kvfold", "drift", request.model, request.out, *rounded, "--layers"]
        )
    figures = format_table(report.format_rows())
    return "\n".join(
        [
            format_labeled_rows(rows),
            "",
            *figures,
            "",
            *format_table(format_layer_rows(report)),
            _LEGEND,
        ]
    )


def format_layer_rows(report: "DriftReport") -> list[tuple[str, ...]]:
    """The cells of a table with the relative errors of each layer; its last row has the largest
    errors that rounding alone causes.
    """
    first, second = zip(*_LAYER_COLUMNS.values(), strict=True)
    rows = [("layer", *first), ("from 0", *second)]
    for index, layer in enumerate(report.layers):
        errors = [format_layer_error(getattr(layer, name)) for name in _LAYER_COLUMNS]
        rows.append((str(index), *errors))
    if report.floor is not None:
        largest = []
        for name in _LAYER_COLUMNS:
            floors = [getattr(layer, name) for layer in report.floor.layers]
            largest.append(format_layer_error(max(floors, default=math.nan)))
        rows.append(("rounding", *largest))
    return rows
