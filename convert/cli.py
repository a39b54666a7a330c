"""The ``kvfold`` command. Commands import heavy modules themselves, so that ``--help`` and
``inspect`` stay quick.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from kvfold.convert import console, processes
from kvfold.convert.checkpoint.folder import RECORD
from kvfold.convert.checkpoint.opening import check_opens
from kvfold.convert.errors import InputError
from kvfold.convert.measure.commands import bench, chat_command, eval_command, sweep
from kvfold.convert.measure.page import conversion_page, drift_page, write_report
from kvfold.convert.progress import Stages
from kvfold.convert.request import ConvertRequest, DriftRequest
from kvfold.convert.uptrain.__main__ import uptrain

_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


class _Commands(click.Group):
    """A group that lists its commands in the order of their definitions below."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="kvfold", prog_name="kvfold")
@click.pass_context
def kvfold(ctx: click.Context) -> None:
    """Convert trained checkpoints to a far smaller KV cache, and measure what the conversion costs.

    MODEL is a folder or a Hugging Face hub id, optionally with a revision (id@revision).
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@kvfold.command(short_help="Show MODEL's attention, its possible targets and their savings.")
@click.argument("model", required=False, metavar="MODEL")
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value=console.STDOUT,
    metavar="[FILE|-]",
    help=(
        "Write the facts as JSON to FILE; without FILE, or with -, to stdout, with no other output"
        " there."
    ),
)
def inspect(model: str | None, json_file: str | None) -> None:
    """Show MODEL's attention kind, heads and cache bytes per token, and the targets it can be
    converted to.

    Only headers and the config are read, so the weights of a hub model are not downloaded.
    """
    from kvfold.convert.measure.inspect import inspect_checkpoint

    # In `--json MODEL`, click took MODEL for the optional file.
    if model is None:
        model = json_file
        json_file = console.STDOUT
    if model in (None, console.STDOUT):
        raise click.UsageError("missing argument 'MODEL'", click.get_current_context())
    console.check_files(json_file)
    facts = inspect_checkpoint(str(model))
    console.tell(json_file, facts.to_dict, facts.summary())


def _convert_request(options: dict[str, Any], further: dict[str, Any]) -> ConvertRequest:
    """The request from the command line's options, or from a recipe overridden by the options that
    were given.
    """
    from kvfold.convert.recipes import recipe_request

    ctx = click.get_current_context()
    recipe = further.pop("recipe")
    if recipe is None and options["to"] is None:
        raise click.UsageError("missing option '--to' (gqa, mqa or mla); or use '--recipe'", ctx)
    if recipe is None:
        return ConvertRequest(**options)
    given = {
        name: value for name, value in options.items() if ctx.get_parameter_source(name) in _GIVEN
    }
    return recipe_request(recipe, **given)


_recipe = click.option(
    "--recipe",
    metavar="NAME|FILE.toml",
    help="Recipe with default options; options on the command line override its values.",
)
_result_files = (
    console.json_option("Also write the result to FILE; with -, write only it to stdout."),
    console.report_option("charts of the results"),
)


@kvfold.command(
    cls=console.PanelCommand, short_help="Convert MODEL to a smaller KV cache, into the folder OUT."
)
@console.request_options(
    ConvertRequest,
    before={"allow_growth": [_recipe], "trust_remote_code": _result_files},
    build=_convert_request,
)
def convert(request: ConvertRequest, json_file: str | None, report: str | None) -> None:
    """Convert MODEL and write the result to the folder OUT."""
    console.check_files(json_file, report=report)
    from kvfold.convert.conversion.convert import convert_checkpoint

    if not (request.quiet or request.dry_run) and processes.launched_as_rank0():
        click.echo(f"reading {request.model}", err=True)
    with processes.process_group(request.device):
        result = convert_checkpoint(request)
        if processes.is_rank0():
            if report is not None and not request.dry_run:
                write_report(
                    conversion_page(result, result.summary().splitlines()), report, request.quiet
                )
            console.tell(
                json_file,
                result.to_dict,
                result.summary() if request.dry_run or not request.quiet else "",
            )


kvfold.add_command(sweep)
_layers = click.option(
    "--layers", is_flag=True, help="Print every layer, the rounding floor and what the terms mean."
)


@kvfold.command(short_help="Measure the drift of OUT from MODEL, layer by layer.")
@console.request_options(
    DriftRequest,
    before={
        "trust_remote_code": [
            _layers,
            console.json_option(),
            console.report_option("charts of the drift"),
        ]
    },
)
def drift(request: DriftRequest, layers: bool, json_file: str | None, report: str | None) -> None:
    """Measure the drift of the converted checkpoint OUT from MODEL, layer by layer and in the
    predictions.
    """
    from kvfold.convert.text.corpus import check_sources

    console.check_files(json_file, report=report)
    check_sources(filter(None, [request.text]), "text")
    if not request.quiet:
        click.echo(f"reading {request.model} and {request.out}", err=True)
    check_opens(request.model, request.out)
    from kvfold.convert.measure.drift import drift_checkpoints, drift_table, heading

    measured = drift_checkpoints(request)
    if report is not None:
        write_report(drift_page(measured, heading(measured)), report, request.quiet)
    console.tell(json_file, measured.to_dict, drift_table(measured, layers))


@kvfold.command(short_help="Check that OUT is intact: hashes, shapes, finite numbers.")
@click.argument("out")
@console.json_option()
def verify(out: str, json_file: str | None) -> None:
    """Check that OUT is intact: hashes, shapes, loading, finite numbers.

    Reads every byte of OUT but runs no model. Compares the files with the hashes in kvfold.json,
    and the tensors with the class that config.json names (built on the meta device), and lists
    every difference.
    """
    from kvfold.convert.measure.verify import check_verified, verify_checkpoint

    console.check_files(json_file)
    with Stages()(f"verifying {out}"):
        done = verify_checkpoint(out)
    console.tell(json_file, done.to_dict, "" if done.problems else done.summary())
    check_verified(done)


kvfold.add_command(eval_command)
kvfold.add_command(uptrain)
kvfold.add_command(bench)
kvfold.add_command(chat_command)


@kvfold.command(short_help="Upload OUT to a model repository on the hub.")
@click.argument("out")
@click.argument("repo", metavar="REPO")
@click.option(
    "--private",
    is_flag=True,
    help="Create REPO as a private repository; an existing one stays as it is.",
)
def push(out: str, repo: str, private: bool) -> None:
    """Upload the converted checkpoint OUT, with its model card, to the model repository REPO
    (owner/name) on the hub.

    OUT is verified first. REPO is created if it does not exist. The token is that of `hf auth
    login`, or HF_TOKEN.
    """
    from kvfold.convert.checkpoint.hub import HUB_ID, upload
    from kvfold.convert.measure.verify import check_verified, verify_checkpoint

    if "@" in repo or not HUB_ID.fullmatch(repo):
        raise click.UsageError(
            f"REPO must be owner/name, not {repo!r}", click.get_current_context()
        )
    if Path(out).is_dir() and not (Path(out) / RECORD).exists():
        raise InputError(
            f"{out} has no {RECORD}, so kvfold did not write it; give the output folder of a"
            " conversion"
        )
    with Stages()(f"verifying {out}"):
        check_verified(verify_checkpoint(out))
    with Stages()(f"uploading {out}"):
        url = upload(Path(out), repo, private)
    click.echo(f"uploaded {out}: {url}")


@kvfold.command(short_help="List the shipped recipes for `kvfold convert --recipe`.")
@console.json_option()
def recipes(json_file: str | None) -> None:
    """List the shipped recipes for `kvfold convert --recipe`."""
    from kvfold.convert.recipes import recipe_list, recipe_table

    console.tell(json_file, recipe_list, recipe_table())


@kvfold.command(short_help="Convert the small shipped model to every target and measure.")
@click.argument("folder", metavar="[DIR]", required=False)
@console.json_option()
def demo(folder: str | None, json_file: str | None) -> None:
    """Convert the small trained model that ships with kvfold to every target, and measure every
    result.

    The converted checkpoints are kept in DIR; without DIR they are written to a temporary folder
    and removed.
    """
    from kvfold.convert.demo import run_demo

    console.check_files(json_file)
    result = run_demo(folder, partial(click.echo, err=json_file == console.STDOUT))
    console.tell(json_file, lambda: result, "")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. Exit status: 0 success, 2 invalid request or input, 1 any other error."""
    console.run_command(kvfold, "kvfold", arguments)
