"""``kvfold sweep``: the loss of many targets, to choose one."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from kvfold.convert.checkpoint.atomic import resolve_output_path
from kvfold.convert.console import (
    STDOUT,
    add_request_options,
    check_models_and_load_torch,
    json_option,
    print_result,
    report_option,
)
from kvfold.convert.conversion.judgment import format_convert_command
from kvfold.convert.errors import InputError
from kvfold.convert.formatting import format_labeled_rows, format_table
from kvfold.convert.measure.sweep_targets import parse_targets
from kvfold.convert.request import SweepRequest
from kvfold.convert.text.corpus import check_text_sources

if TYPE_CHECKING:
    from kvfold.convert.measure.sweep import SweepResult

_TARGET = re.compile(r"[\w+]*[:,][\w:,+]*|\d[\d,+]*|gqa|mqa|mla", re.IGNORECASE)


class _SweepCommand(click.Command):
    """The click command ``sweep``, whose ``--targets`` accepts several words, as in ``--targets
    gqa:4,2 mqa``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Join the words after ``--targets`` that look like targets into one value, then parse as
        click does.
        """
        words: list[str] = []
        for word in args:
            if words[-2:-1] == ["--targets"] and _TARGET.fullmatch(word):
                words[-1] += f" {word}"
            else:
                words.append(word)
        return super().parse_args(ctx, words)


@click.command(cls=_SweepCommand, short_help="Measure the loss of many targets, to choose one.")
@add_request_options(SweepRequest)
@json_option
@report_option
def sweep(request: SweepRequest, json_file: str | None, report: str | None) -> None:
    """Fit and measure many targets of MODEL, the quickest first, without writing them.

    Prints a line per target: cache, saving, excess loss with its interval, KL, agreement, the
    excess expected with --effort normal, time; then the smallest target within the limit, and the
    command that converts to it.
    Statistics are stored in the temporary folder (TMPDIR) during the sweep. An interrupted sweep
    starts over.
    """
    # A sweep takes long: what its last second would refuse is refused in the first.
    if request.out is not None:
        resolve_output_path(request.out, overwrite=None, model=request.model)
    check_text_sources(request.calibration)
    parse_targets(request.targets)
    check_models_and_load_torch(request.model, quiet=request.quiet)
    from kvfold.convert.conversion.convert import convert_checkpoint
    from kvfold.convert.measure.report import plot_loss_by_cache, write_report
    from kvfold.convert.measure.sweep import sweep_checkpoint

    result = sweep_checkpoint(request)
    summary = summarize_sweep(result)
    if report is not None:
        write_report(
            report,
            command="kvfold sweep",
            headline=result.verdict,
            tables=[result.format_rows()],
            plots=plot_loss_by_cache(result),
            summary=summary,
            quiet=request.quiet,
        )
    print_result(json_file, result.to_dict, summary)
    if request.out is not None:
        if (result.smallest or result.smallest_after_training) is None:
            raise InputError(
                f"{request.out}: nothing was written; {result.verdict}; raise --within, try"
                " larger --targets, or add --refine auto",
                field="within",
            )
        converted = convert_checkpoint(replace(result.recommended, quiet=request.quiet))
        click.echo(f"\n{converted.summary()}", err=json_file == STDOUT)


def summarize_sweep(sweep: "SweepResult") -> str:
    """The text for the terminal: the source and the text, a line per target, and one command: it
    converts to the smallest target within the limit, or trains the nearest one.
    """
    elements = f"{sweep.cache_elements} cache elements per token per layer"
    heading = [("source", f"{sweep.model}: {sweep.kind}, {elements}"), ("text", sweep.text)]
    verdict = format_labeled_rows(
        [("verdict", sweep.verdict)], format_convert_command(sweep.recommended)
    )
    legend = "normal: the excess that --effort normal is expected to leave at most"
    table = format_table(sweep.format_rows())
    return "\n".join([format_labeled_rows(heading), "", *table, "", legend, "", verdict])
