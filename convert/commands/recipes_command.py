"""``kvfold recipes``: the recipes that ship with kvfold."""

import click

from kvfold.convert.console import check_output_files, json_option, print_result


@click.command(short_help="List the shipped recipes for `kvfold convert --recipe`.")
@json_option
def recipes(json_file: str | None) -> None:
    """List the shipped recipes for `kvfold convert --recipe`."""
    check_output_files(json_file)
    from kvfold.convert.recipes import format_recipes, list_recipes

    print_result(json_file, list_recipes, format_recipes())
