"""The command ``kvfold bench``. Heavy modules are imported inside it: ``--help`` must be quick."""

import json

import click

from kvfold.convert.console import STDOUT, check_plot, check_writable, request_options, write_text
from kvfold.convert.measure.figures import decoding_speed
from kvfold.convert.measure.options import json_file_option
from kvfold.convert.request import BenchRequest

_plot = click.option("--plot", metavar="FILE", help="Also draw them (PNG, SVG, PDF); needs the report extra.")


@click.command(short_help="Decode speed, cache and memory of MODELs side by side.")
@request_options(BenchRequest)
@json_file_option
@_plot
def bench(request: BenchRequest, json_file: str | None, plot: str | None) -> None:
    """Time MODELs side by side: prefill, decoding, cache and memory, with ratios to the first.

    A latent (MLA) model is timed in stock form and absorbed. Decoding starts from a cache of random values.
    """
    from kvfold.convert.measure.bench import bench_checkpoints

    if plot is not None:
        check_plot(plot)
    if json_file is not None:
        check_writable(json_file)
    report = bench_checkpoints(request, tell=lambda text: click.echo(text, err=True))
    if json_file is not None:
        write_text(json_file, json.dumps(report.to_dict(), indent=2) + "\n")
    if plot is not None:
        decoding_speed(report.to_dict()).save(plot)
    click.echo(report.table(), err=json_file == STDOUT)
