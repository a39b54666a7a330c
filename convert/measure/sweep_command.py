"""The command ``kvfold sweep``."""

import re
from functools import partial
from typing import Any

import click

from kvfold.convert import request as rq
from kvfold.convert.checkpoint.atomic import check_output
from kvfold.convert.checkpoint.opening import check_opens
from kvfold.convert.console import (
    STDOUT,
    Choice,
    PanelCommand,
    PanelOption,
    check_plot,
    check_writable,
    steps_or_auto,
    write_text,
)
from kvfold.convert.measure.figures import excess_by_cache
from kvfold.convert.measure.page import check_report, sweep_page, write_report
from kvfold.convert.measure.sweep_targets import WITHIN, parse_targets
from kvfold.convert.text.corpus import check_sources

_TARGET = re.compile(r"[\w+]*[:,][\w:,+]*|\d[\d,+]*|gqa|mqa|mla", re.IGNORECASE)
_option = partial(click.option, cls=PanelOption, show_default=True)


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
@click.argument("model")
@_option(
    "--targets",
    panel="Targets",
    metavar="TARGET...",
    multiple=True,
    help="gqa:HEADS, mqa, mla:ELEMENTS (the split is chosen) or mla:RANK+ROTARY: gqa:4,2 mqa mla:576,512+64. "
    "Default: a few that suit MODEL.",
)
@_option(
    "--layout",
    panel="Targets",
    type=Choice(rq.LAYOUTS),
    help=f"Layout of MLA targets (default {rq.DEFAULT_LAYOUT}).",
)
@_option(
    "--within",
    panel="Decision",
    type=click.FloatRange(0, min_open=True),
    default=WITHIN,
    metavar="X",
    help="Perplexity that may be lost, as a fraction: 0.01 is 1 %. The smallest target within it is named.",
)
@_option("--out", panel="Decision", metavar="OUT", help="Also write the target that is named, to the folder OUT.")
@_option(
    "--calibration",
    panel="Calibration",
    multiple=True,
    metavar="FILE|DATASET|self",
    help="Text like that of the model's use, as in `kvfold convert`.",
)
@_option("--samples", panel="Calibration", type=int, default=rq.ConvertRequest.samples, help="Calibration sequences.")
@_option("--seq-len", panel="Calibration", type=int, default=rq.ConvertRequest.seq_len, help="Tokens per sequence.")
@_option("--seed", panel="Calibration", type=int, default=rq.ConvertRequest.seed, help="Seed of the sequences drawn.")
@_option(
    "--refine",
    panel="Refinement",
    type=steps_or_auto,
    metavar="STEPS|auto",
    default=rq.ConvertRequest.refine,
    help="Reconstruction steps per layer of every target.",
)
@_option("--device", panel="Running", type=Choice(rq.DEVICES), default="auto", help="auto: the GPU where there is one.")
@_option("--dtype", panel="Running", type=Choice(rq.DTYPES), default="auto", help="Dtype that OUT would be stored in.")
@_option(
    "--json", "json_file", panel="Running", metavar="FILE|-", help="Also write the result to FILE; -: to stdout alone."
)
@_option("--plot", panel="Running", metavar="FILE", help="Draw the curve (PNG, SVG, PDF); needs the report extra.")
@_option(
    "--report", panel="Running", metavar="DIR", help="Also write DIR/report.html: table and curve, self-contained."
)
@_option("--quiet", panel="Running", is_flag=True, help="No progress.")
@_option("--trust-remote-code", panel="Running", is_flag=True, help="Allow code in the checkpoint to run.")
def sweep(
    model: str,
    targets: tuple[str, ...],
    within: float,
    json_file: str | None,
    plot: str | None,
    report: str | None,
    **options: Any,
) -> None:
    """Fit and measure many targets of MODEL in one walk over its layers, without writing them.

    Prints a line per target: cache, saving, excess loss with its interval, KL, agreement, time; then the smallest
    target within a loss, and the command that converts to it. Statistics are in the temporary folder (TMPDIR) while it
    runs.
    """
    _check_files(model, options["out"], options["calibration"], json_file, plot, report)
    wanted = " ".join(targets) or None
    if wanted is not None:
        parse_targets(wanted)
    if not options["quiet"]:
        click.echo(f"reading {model}", err=True)
    check_opens(model)
    from kvfold.convert.measure.sweep import sweep_checkpoint

    result = sweep_checkpoint(model, wanted, **options)
    if json_file is not None:
        write_text(json_file, result.to_json(within))
    if plot is not None:
        excess_by_cache(result.to_dict(within)).save(plot, result.title())
    if report is not None:
        write_report(sweep_page(result.to_dict(within), result.lines(within)), report, options["quiet"])
    click.echo(f"{result.table()}\n\n{result.decision(within)}", err=json_file == STDOUT)
    if options["out"] is not None:
        click.echo(f"\n{result.convert(within, quiet=options['quiet']).summary()}", err=json_file == STDOUT)


def _check_files(
    model: str,
    out: str | None,
    calibration: tuple[str, ...],
    json_file: str | None,
    plot: str | None,
    report: str | None,
) -> None:
    """What can be refused before anything is loaded."""
    if out is not None:
        check_output(out, model=model)
    check_sources(text for text in calibration if text != rq.SELF)
    if json_file is not None:
        check_writable(json_file)
    if plot is not None:
        check_plot(plot)
    if report is not None:
        check_report(report)
