"""``kvfold sweep``: the loss of many targets, to choose one."""

import re
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvfold.convert.checkpoint.atomic import check_output
from kvfold.convert.checkpoint.opening import check_opens
from kvfold.convert.console import (
    STDOUT,
    PanelCommand,
    PanelOption,
    check_files,
    json_option,
    print_result,
    report_option,
    request_options,
)
from kvfold.convert.conversion.summary import format_block
from kvfold.convert.errors import option_error
from kvfold.convert.formatting import format_table
from kvfold.convert.measure.sweep_targets import WITHIN, parse_targets
from kvfold.convert.request import SweepRequest
from kvfold.convert.text.corpus import check_sources

if TYPE_CHECKING:
    from kvfold.convert.measure.sweep import Sweep

_TARGET = re.compile(r"[\w+]*[:,][\w:,+]*|\d[\d,+]*|gqa|mqa|mla", re.IGNORECASE)


def _rise(context: click.Context, option: click.Parameter, value: str) -> float:
    """The value of ``--within``; its error is worded like those of a request's options."""
    with suppress(ValueError):
        if value.isascii() and 0 < (rise := float(value)) < 1:
            return rise
    raise option_error(
        "within", value, "must be a number above 0 and below 1; 0.01 accepts 1 % more perplexity"
    )


_within = click.option(
    "--within",
    cls=PanelOption,
    panel="Decision",
    type=str,
    callback=_rise,
    default=WITHIN,
    show_default=True,
    metavar="X",
    help=(
        "Largest acceptable rise in perplexity (0.01 is 1 %); the smallest target within it is"
        " recommended."
    ),
)


class _SweepCommand(PanelCommand):
    """A command whose ``--targets`` accepts several words: those that look like targets, as in
    ``gqa:4,2 mqa``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        joined: list[str] = []
        for word in args:
            if len(joined) > 1 and joined[-2] == "--targets" and _TARGET.fullmatch(word):
                joined[-1] += f" {word}"
            else:
                joined.append(word)
        return super().parse_args(ctx, joined)


@click.command(cls=_SweepCommand, short_help="Measure the loss of many targets, to choose one.")
@request_options(SweepRequest)
@_within
@json_option("Also write the result to FILE; with -, write only it to stdout.")
@click.option(
    "--plot", metavar="FILE", help="Draw the curve (PNG, SVG, PDF); needs the report extra."
)
@report_option("the table and the curve")
def sweep(
    request: SweepRequest,
    within: float,
    json_file: str | None,
    plot: str | None,
    report: str | None,
) -> None:
    """Fit and measure many targets of MODEL, the quickest first, without writing them.

    Prints a line per target: cache, saving, excess loss with its interval, KL, agreement, time;
    then the smallest target within the --within limit, and the command that converts to it.
    Statistics are stored in the temporary folder (TMPDIR) during the sweep.
    """
    # A sweep takes long: what its last second would refuse is refused in the first.
    check_files(json_file, plot, report)
    if request.out is not None:
        check_output(request.out, overwrite=None, model=request.model)
    check_sources(request.calibration)
    if request.targets:
        parse_targets(request.targets)
    if not request.quiet:
        click.echo(f"reading {request.model}", err=True)
    check_opens(request.model)
    from kvfold.convert.measure.plots import plot_loss_by_cache
    from kvfold.convert.measure.report import write_report
    from kvfold.convert.measure.sweep import sweep_checkpoint

    result = sweep_checkpoint(request)
    if plot is not None:
        source = result.source
        title = f"{Path(source.name).name}: {source.kind}; {source.held_out}"
        plot_loss_by_cache(result, within).save(plot, title)
        if not request.quiet:
            click.echo(f"wrote {plot}", err=True)
    if report is not None:
        best = result.smallest(within) or result.nearest()
        write_report(
            report,
            command="kvfold sweep",
            headline=result.verdict(within),
            lead=[shlex.join(best.command(result.source.name, best.request.out))],
            tables=[result.table_rows()],
            plots=[plot_loss_by_cache(result, within)],
            notes=[f"measured on {result.source.held_out}"],
            quiet=request.quiet,
        )
    print_result(json_file, lambda: result.to_dict(within), summarize_sweep(result, within))
    if request.out is not None:
        click.echo(
            f"\n{result.convert(within, quiet=request.quiet).summary()}", err=json_file == STDOUT
        )


def summarize_sweep(sweep: "Sweep", within: float) -> str:
    """The text on the terminal: the source and the text, a line per target, the smallest within the
    limit and the command that converts to it.
    """
    source = sweep.source
    elements = f"{source.cache_elements} cache elements per token per layer"
    heading = [("source", f"{source.name}: {source.kind}, {elements}"), ("text", source.held_out)]
    row = sweep.smallest(within)
    effort = []
    if row is None:
        # Polishing brings the nearest one nearer.
        nearest = sweep.nearest()
        row = replace(nearest, request=replace(nearest.request, refine=0))
        effort = ["--effort", "thorough"]
    command = [*row.command(source.name, row.request.out), *effort]
    verdict = format_block([("verdict", sweep.verdict(within))], command)
    return "\n".join([format_block(heading), "", *format_table(sweep.table_rows()), "", verdict])
