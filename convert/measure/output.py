"""How a command tells its result: files that its options name, its numbers as JSON, its tables."""

import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
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


def table(rows: Sequence[Sequence[str]], least: Sequence[int] = (), left: Sequence[int] = (0,)) -> list[str]:
    """Rows of cells as aligned lines, columns ``left`` to the left; column i is at least ``least[i]`` wide.

    The last cell of a row with fewer cells than the first may be a sentence: it widens no column.
    """
    whole = len(rows[0])
    columns = zip_longest(*(row if len(row) == whole else row[:-1] for row in rows), fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    widths = [max(pair) for pair in zip_longest(widths, least, fillvalue=0)]
    lines = []
    for row in rows:
        aligned = [cell.ljust if i in left else cell.rjust for i, cell in enumerate(row)]
        cells = [align(width) for align, width in zip(aligned, widths, strict=False)]
        if len(row) < whole:
            cells[-1:] = row[-1:]
        lines.append("  ".join(cells).rstrip())
    return lines
