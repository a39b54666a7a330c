"""``kvfold inspect``: what a model caches, and what it can be converted to."""

import click

from kvfold.convert.console import STDOUT, check_files, tell


@click.command(short_help="Show MODEL's attention, its possible targets and their savings.")
@click.argument("model", required=False, metavar="MODEL")
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value=STDOUT,
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
        json_file = STDOUT
    if model in (None, STDOUT):
        raise click.UsageError("missing argument 'MODEL'", click.get_current_context())
    check_files(json_file)
    facts = inspect_checkpoint(str(model))
    tell(json_file, facts.to_dict, facts.summary())
