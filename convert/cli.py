"""The ``kvfold`` command. What is heavy is imported inside the commands: ``--help`` and ``inspect`` must be quick."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from kvfold.convert import request as rq
from kvfold.convert.console import check_plot, check_writable, run_command, write_text

_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


class _Commands(click.Group):
    """Lists commands in the order they are written below, which is the order a person meets them in."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class _StepsOrAuto(click.ParamType[int | str]):
    name = "STEPS|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto":
            return "auto"
        if not str(value).isdigit():
            self.fail(f"expected a number of steps or auto, found {value!r}")
        return int(value)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="kvfold", prog_name="kvfold")
@click.pass_context
def kvfold(ctx: click.Context) -> None:
    """Convert trained checkpoints so that they need a far smaller KV cache, and measure what that cost.

    MODEL is a folder or a Hugging Face hub id (id@revision for a revision).
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@kvfold.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the summary.")
def inspect(model: str, as_json: bool) -> None:
    """Show what MODEL is: attention kind, heads, cache bytes per token, and what it can become.

    Reads the headers and the config only: a hub id is not downloaded.
    """
    from kvfold.convert.inspection import inspect_checkpoint, summary

    found = inspect_checkpoint(model)
    click.echo(json.dumps(found, indent=2) if as_json else summary(found))


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


_TARGET_OPTIONS = _options(
    click.option(
        "--to", type=click.Choice(rq.TARGETS), help="Attention kind to convert to; required without --recipe."
    ),
    click.option("--kv-heads", type=int, metavar="N", help="Key/value heads to keep (gqa)."),
    click.option("--kv-rank", type=int, metavar="R", help="Latent numbers cached per token and layer (mla)."),
    click.option("--rope-dim", type=int, metavar="P", help="Rotary-key numbers cached per token and layer (mla)."),
    click.option("--budget", type=int, metavar="N", help="Choose R + P = N by measured drift (mla)."),
    click.option("--q-rank", type=int, metavar="N", help="Also factor the queries through a latent of N (mla)."),
    click.option(
        "--method", metavar="NAME", help="principal (calibrated, default), mean, first, random; mla: principal, svd."
    ),
    click.option("--group", type=click.Choice(rq.GROUPINGS), help="Which heads share: similar ones, or neighbours."),
    click.option(
        "--layout", type=click.Choice(rq.LAYOUTS), help="What an MLA checkpoint is written as (default deepseek)."
    ),
)
_CALIBRATION_OPTIONS = _options(
    click.option(
        "--calibration", metavar="FILE|DATASET", help="Text like the model's own use: .txt, .jsonl, or a datasets name."
    ),
    click.option("--samples", type=int, default=128, show_default=True, help="Calibration sequences."),
    click.option("--seq-len", type=int, default=512, show_default=True, help="Tokens per sequence."),
    click.option("--seed", type=int, default=0, show_default=True, help="Draws the sequences (and --method random)."),
    click.option(
        "--refine", type=_StepsOrAuto(), default=0, show_default=True, help="Reconstruction steps per layer, no labels."
    ),
)
_RUNNING_OPTIONS = _options(
    click.option("--device", type=click.Choice(rq.DEVICES), default="auto", show_default=True),
    click.option(
        "--dtype", type=click.Choice(rq.DTYPES), default="auto", show_default=True, help="Stored dtype; auto keeps it."
    ),
    click.option("--max-shard-size", default="5GB", show_default=True, metavar="SIZE", help="Largest weight file."),
    click.option("--dry-run", is_flag=True, help="Print the plan and the disk space; touch nothing."),
    click.option("--resume", is_flag=True, help="Go on at a killed calibrated run's last finished layer, or start."),
    click.option(
        "--overwrite", is_flag=True, help="Replace OUT; the old one stays whole until the new one is on disk."
    ),
    click.option("--quiet", is_flag=True, help="No progress, no summary."),
    click.option("--allow-growth", is_flag=True, help="Permit a target that caches as much as the source, or more."),
    click.option("--trust-remote-code", is_flag=True, help="Permit code that the checkpoint carries to run."),
)


@kvfold.command()
@click.argument("model")
@click.argument("out")
@_TARGET_OPTIONS
@_CALIBRATION_OPTIONS
@_RUNNING_OPTIONS
@click.option("--recipe", metavar="NAME|FILE.toml", help="Take what is not given here from a recipe.")
def convert(recipe: str | None, **options: Any) -> None:
    """Convert MODEL and write the result to the folder OUT."""
    from kvfold.convert.recipes import recipe_request

    ctx = click.get_current_context()
    if recipe is None and options["to"] is None:
        raise click.UsageError("missing option '--to': gqa, mqa or mla; or name a --recipe", ctx)
    given = {name: value for name, value in options.items() if ctx.get_parameter_source(name) in _GIVEN}
    request = rq.ConvertRequest(**options) if recipe is None else recipe_request(recipe, **given)
    from kvfold.convert.conversion.run import convert_checkpoint

    result = convert_checkpoint(request)
    if request.dry_run or not request.quiet:
        click.echo(result.summary())


@kvfold.command()
@click.argument("model")
@click.argument("out")
@click.option(
    "--text", metavar="FILE", help="Text to measure on (.txt, .jsonl); default: held-out text that ships with kvfold."
)
@click.option("--samples", type=click.IntRange(1), default=16, show_default=True, help="Sequences.")
@click.option("--seq-len", type=click.IntRange(2), default=512, show_default=True, help="Tokens per sequence.")
@click.option("--device", type=click.Choice(rq.DEVICES), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(rq.DTYPES), default="auto", show_default=True, help="Dtype to compute in.")
@click.option("--json", "json_file", metavar="FILE", help="Also write the numbers to FILE.")
@click.option("--trust-remote-code", is_flag=True, help="Permit code that MODEL carries for its tokenizer to run.")
def drift(model: str, out: str, json_file: str | None, **options: Any) -> None:
    """Measure how far the converted checkpoint OUT is from MODEL, layer by layer and at the end."""
    from kvfold.convert.measure.drift import drift_checkpoints
    from kvfold.convert.measure.table import drift_table

    if json_file is not None:
        check_writable(json_file)
    report = drift_checkpoints(model, out, **options)
    if json_file is not None:
        write_text(json_file, report.to_json())
    click.echo(drift_table(report))


@kvfold.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--context", default="2048", show_default=True, metavar="N,N", help="Tokens in the cache.")
@click.option("--batch", default="1", show_default=True, metavar="N,N", help="Sequences decoded at once.")
@click.option("--shape", metavar="NAME", help="Each attention kind of a known shape, random weights: llama-2-7b, ...")
@click.option("--layers", type=click.IntRange(1), metavar="N", help="Layers of --shape.")
@click.option("--device", type=click.Choice(rq.DEVICES), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(rq.DTYPES), default="auto", show_default=True, help="Dtype to compute in.")
@click.option("--cache", type=click.Choice(["dynamic", "static"]), default="dynamic", show_default=True)
@click.option("--prefill-tokens", type=click.IntRange(0), metavar="N", help="At most so many; 0: no prefill.")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="CPU threads; default: torch's own choice.")
@click.option("--json", "json_file", metavar="FILE", help="Also write the numbers to FILE.")
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
    """Time MODELs side by side: prefill and decoding, cache and memory, ratios to the first.

    A latent (MLA) model is timed in stock form and absorbed. Decoding starts from a cache of random values.
    """
    from kvfold.convert.bench import run

    contexts, batches = run.numbers(context, "--context"), run.numbers(batch, "--batch")
    chosen = run.subjects(models, shape, layers, max(contexts))
    if plot is not None:
        from kvfold.convert.bench.plot import draw

        check_plot(plot)
    if json_file is not None:
        check_writable(json_file)
    report = run.bench(chosen, run.Options(contexts, batches, **options), lambda text: click.echo(text, err=True))
    if json_file is not None:
        write_text(json_file, json.dumps(report, indent=2) + "\n")
    if plot is not None:
        draw(report, plot)
    click.echo(run.bench_table(report))


@kvfold.command()
@click.argument("folder", metavar="[DIR]", required=False)
def demo(folder: str | None) -> None:
    """Convert the small trained model that ships with kvfold to every target, and measure each.

    The converted checkpoints are kept in DIR; without DIR they are made in a temporary folder and removed.
    """
    from kvfold.convert.demo import run_demo

    run_demo(folder, click.echo)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. Exit status: 0 done, 2 the request or the input is wrong, 1 anything else."""
    run_command(kvfold, "kvfold", arguments)
