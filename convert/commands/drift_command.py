"""``kvfold drift``: how far a converted checkpoint is from its source."""

import click

from kvfold.convert.checkpoint.opening import check_opens
from kvfold.convert.console import (
    check_files,
    json_option,
    report_option,
    request_options,
    tell,
)
from kvfold.convert.measure.page import drift_page, write_report
from kvfold.convert.request import DriftRequest
from kvfold.convert.text.corpus import check_sources

_layers = click.option(
    "--layers", is_flag=True, help="Print every layer, the rounding floor and what the terms mean."
)


@click.command(short_help="Measure the drift of OUT from MODEL, layer by layer.")
@request_options(
    DriftRequest,
    before={"trust_remote_code": [_layers, json_option(), report_option("charts of the drift")]},
)
def drift(request: DriftRequest, layers: bool, json_file: str | None, report: str | None) -> None:
    """Measure the drift of the converted checkpoint OUT from MODEL, layer by layer and in the
    predictions.
    """
    check_files(json_file, report=report)
    check_sources(filter(None, [request.text]), "text")
    if not request.quiet:
        click.echo(f"reading {request.model} and {request.out}", err=True)
    check_opens(request.model, request.out)
    from kvfold.convert.measure.drift import drift_checkpoints, drift_table, heading

    measured = drift_checkpoints(request)
    if report is not None:
        write_report(drift_page(measured, heading(measured)), report, request.quiet)
    tell(json_file, measured.to_dict, drift_table(measured, layers))
