"""``kvfold convert``: convert a checkpoint, with options of the command line or of a recipe."""

from typing import Any

import click
from click.core import ParameterSource

from kvfold.convert.console import add_request_options, json_option, print_result, report_option
from kvfold.convert.errors import InputError, escape_text
from kvfold.convert.processes import count_launched
from kvfold.convert.request import ConvertRequest

_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def _build_convert_request(options: dict[str, Any], further: dict[str, Any]) -> ConvertRequest:
    """The request from the options of the command line; with ``--recipe``, from the recipe, whose
    values the given options replace.
    """
    from kvfold.convert.recipes import make_recipe_request

    recipe = further.pop("recipe")
    if recipe is None:
        if options["to"] is None:
            raise click.UsageError("missing option '--to' (gqa, mqa or mla); or use '--recipe'")
        return ConvertRequest(**options)
    context = click.get_current_context()
    given = {
        name: value
        for name, value in options.items()
        if context.get_parameter_source(name) in _GIVEN
    }
    return make_recipe_request(recipe, **given)


_recipe = click.option(
    "--recipe",
    metavar="NAME|FILE.toml",
    help="Recipe with default options; options on the command line override its values.",
)


@click.command(short_help="Convert MODEL to a smaller KV cache, into the folder OUT.")
@add_request_options(ConvertRequest, _build_convert_request)
@_recipe
@json_option
@report_option
def convert(request: ConvertRequest, json_file: str | None, report: str | None) -> None:
    """Convert MODEL and write the result to the folder OUT."""
    if count_launched() > 1:
        raise InputError(
            "torchrun: a conversion by several processes was withdrawn; run kvfold convert without"
            " torchrun, with --device cuda or with more threads (OMP_NUM_THREADS)"
        )
    from kvfold.convert.conversion.convert import convert_checkpoint
    from kvfold.convert.conversion.memory import check_memory
    from kvfold.convert.conversion.results import make_baseline_warning

    if not (request.quiet or request.dry_run):
        click.echo(f"reading {escape_text(request.model)}", err=True)
    result = convert_checkpoint(request)
    summary = result.summary()
    if report is not None and not request.dry_run:
        from kvfold.convert.measure.report import write_drift_report

        title = f"{result.plan.checkpoint.origin} as {result.attention.after}"
        write_drift_report(report, "kvfold convert", title, result.drift, summary, request.quiet)
    shown = summary if request.dry_run or not request.quiet else ""
    print_result(json_file, result.to_dict, shown)
    if not shown and (warning := make_baseline_warning(result.plan)):
        click.echo(f"warning: {warning}", err=True)
    if request.dry_run:
        check_memory(result.plan)
