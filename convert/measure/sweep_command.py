"""The command ``kvfold sweep``."""

import re

import click

from kvfold.convert.checkpoint.atomic import check_output
from kvfold.convert.checkpoint.opening import check_opens
from kvfold.convert.console import (
    STDOUT,
    PanelCommand,
    check_plot,
    check_writable,
    request_options,
    write_text,
)
from kvfold.convert.measure.figures import excess_by_cache
from kvfold.convert.measure.page import check_report, sweep_page, write_report
from kvfold.convert.measure.sweep_targets import WITHIN, parse_targets
from kvfold.convert.request import SELF, SweepRequest
from kvfold.convert.text.corpus import check_sources

_TARGET = re.compile(r"[\w+]*[:,][\w:,+]*|\d[\d,+]*|gqa|mqa|mla", re.IGNORECASE)
_within = click.option(
    "--within",
    type=click.FloatRange(0, min_open=True),
    default=WITHIN,
    show_default=True,
    metavar="X",
    help="Perplexity that may be lost, as a fraction: 0.01 is 1 %. The smallest target within it is named.",
)
_files = (
    click.option("--json", "json_file", metavar="FILE|-", help="Also write the result to FILE; -: to stdout alone."),
    click.option("--plot", metavar="FILE", help="Draw the curve (PNG, SVG, PDF); needs the report extra."),
    click.option("--report", metavar="DIR", help="Also write DIR/report.html: table and curve, self-contained."),
)


class _Command(PanelCommand):
    """Takes the words behind ``--targets`` that can be targets as its one value: ``--targets gqa:4,2 mqa``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        joined: list[str] = []
        for word in args:
            if len(joined) > 1 and joined[-2] == "--targets" and _TARGET.fullmatch(word):
                joined[-1] += f" {word}"
            else:
                joined.append(word)
        return super().parse_args(ctx, joined)


@click.command(cls=_Command, short_help="What many targets of MODEL would cost, to choose one.")
@request_options(SweepRequest, before={"out": [_within], "quiet": _files})
def sweep(request: SweepRequest, within: float, json_file: str | None, plot: str | None, report: str | None) -> None:
    """Fit and measure many targets of MODEL in one walk over its layers, without writing them.

    Prints a line per target: cache, saving, excess loss with its interval, KL, agreement, time; then the smallest
    target within a loss, and the command that converts to it. Statistics are in the temporary folder (TMPDIR) while it
    runs.
    """
    _check_files(request, json_file, plot, report)
    if request.targets is not None:
        parse_targets(request.targets)
    if not request.quiet:
        click.echo(f"reading {request.model}", err=True)
    check_opens(request.model)
    from kvfold.convert.measure.sweep import sweep_checkpoint

    result = sweep_checkpoint(request)
    if json_file is not None:
        write_text(json_file, result.to_json(within))
    if plot is not None:
        excess_by_cache(result.to_dict(within)).save(plot, result.title())
    if report is not None:
        write_report(sweep_page(result.to_dict(within), result.lines(within)), report, request.quiet)
    click.echo(f"{result.table()}\n\n{result.decision(within)}", err=json_file == STDOUT)
    if request.out is not None:
        click.echo(f"\n{result.convert(within, quiet=request.quiet).summary()}", err=json_file == STDOUT)


def _check_files(request: SweepRequest, json_file: str | None, plot: str | None, report: str | None) -> None:
    """Raises InputError for files that cannot be read or written, before anything is loaded."""
    if request.out is not None:
        check_output(request.out, model=request.model)
    texts = (request.calibration,) if isinstance(request.calibration, str) else request.calibration or ()
    check_sources(text for text in texts if text != SELF)
    if json_file is not None:
        check_writable(json_file)
    if plot is not None:
        check_plot(plot)
    if report is not None:
        check_report(report)
