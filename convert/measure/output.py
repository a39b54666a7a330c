"""How a command tells its result: files that its options name, its numbers as JSON, its text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvfold.convert.console import STDOUT, check_matplotlib, check_plot, check_writable, write_text
from kvfold.convert.errors import InputError, opt

json_file_option = click.option(
    "--json",
    "json_file",
    metavar="FILE|-",
    help="Also write the numbers to FILE; -: to stdout, and nothing else there.",
)


def check_files(json_file: str | None, plot: str | None = None, report: str | None = None) -> None:
    """Raise InputError for a file of ``--json``, ``--plot`` or ``--report`` that cannot be drawn or written."""
    if json_file is not None:
        check_writable(json_file)
    if plot is not None:
        check_plot(plot)
    if report is not None:
        check_matplotlib("report", report)
        if Path(report).exists() and not Path(report).is_dir():
            raise InputError(f"{opt('report', report)} is a file; name a folder")


def tell(json_file: str | None, value: Callable[[], Any], text: str) -> None:
    """Print ``text``; where ``json_file`` is given write ``value`` there, and where that is stdout nothing else."""
    if json_file is not None:
        write_text(json_file, json.dumps(value(), indent=2) + "\n")
    if text:
        click.echo(text, err=json_file == STDOUT)
