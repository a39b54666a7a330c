"""``kvfold recipes``: the recipes that ship with kvfold."""

import click

from kvfold.convert.console import json_option, tell


@click.command(short_help="List the shipped recipes for `kvfold convert --recipe`.")
@json_option()
def recipes(json_file: str | None) -> None:
    """List the shipped recipes for `kvfold convert --recipe`."""
    from kvfold.convert.recipes import recipe_list, recipe_table

    tell(json_file, recipe_list, recipe_table())
