"""Options that the commands which measure share, and how a command tells its result."""

import json
from collections.abc import Callable
from typing import Any

import click

from kvfold.convert.console import STDOUT, write_text

json_file_option = click.option(
    "--json",
    "json_file",
    metavar="FILE|-",
    help="Also write the numbers to FILE; -: to stdout, and nothing else there.",
)


def tell(json_file: str | None, value: Callable[[], Any], text: str) -> None:
    """Print ``text``; where ``json_file`` is given write ``value`` there, and where that is stdout nothing else."""
    if json_file is not None:
        write_text(json_file, json.dumps(value(), indent=2) + "\n")
    if text:
        click.echo(text, err=json_file == STDOUT)
