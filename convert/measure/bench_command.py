"""The command ``kvfold bench``. Heavy modules are imported inside it: ``--help`` must be quick."""

import json
from typing import Any

import click

from kvfold.convert.console import STDOUT, Choice, check_plot, check_writable, write_text
from kvfold.convert.measure.figures import decoding_speed
from kvfold.convert.measure.options import compute_dtype_option, device_option, json_file_option


@click.command(short_help="Decode speed, cache and memory of MODELs side by side.")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--context", default="2048", show_default=True, metavar="N,N", help="Tokens in the cache.")
@click.option("--batch", default="1", show_default=True, metavar="N,N", help="Sequences decoded at once.")
@click.option("--shape", metavar="NAME", help="Random weights in a known shape, every attention kind: llama-2-7b, ...")
@click.option("--layers", type=click.IntRange(1), metavar="N", help="Layers of --shape.")
@device_option
@compute_dtype_option
@click.option(
    "--cache", type=Choice(["dynamic", "static"]), default="dynamic", show_default=True, help="Kind of KV cache."
)
@click.option(
    "--prefill-tokens", type=click.IntRange(0), metavar="N", help="Tokens to prefill at most; 0 skips the prefill."
)
@click.option("--threads", type=click.IntRange(1), metavar="N", help="CPU threads; default: torch's choice.")
@json_file_option
@click.option("--plot", metavar="FILE", help="Also draw them (PNG, SVG, PDF); needs the report extra.")
def bench(
    models: tuple[str, ...],
    context: str,
    batch: str,
    shape: str | None,
    layers: int | None,
    json_file: str | None,
    plot: str | None,
    **options: Any,
) -> None:
    """Time MODELs side by side: prefill, decoding, cache and memory, with ratios to the first.

    A latent (MLA) model is timed in stock form and absorbed. Decoding starts from a cache of random values.
    """
    from kvfold.convert.measure import bench as run
    from kvfold.convert.measure.bench_models import BenchOptions

    contexts, batches = run.numbers(context, "--context"), run.numbers(batch, "--batch")
    chosen = run.subjects(models, shape, layers, max(contexts))
    if plot is not None:
        check_plot(plot)
    if json_file is not None:
        check_writable(json_file)
    report = run.bench(chosen, BenchOptions(contexts, batches, **options), lambda text: click.echo(text, err=True))
    if json_file is not None:
        write_text(json_file, json.dumps(report.to_dict(), indent=2) + "\n")
    if plot is not None:
        decoding_speed(report.to_dict()).save(plot)
    click.echo(report.table(), err=json_file == STDOUT)
