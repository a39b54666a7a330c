"""The page for ``--report``: one self-contained HTML file with the results of a command."""

import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvfold.attention.drift.metrics import format_cache_saving, format_metrics, make_position_rows
from kvfold.attention.drift.report import DriftReport
from kvfold.convert.console import REPORT
from kvfold.convert.conversion.judgment import format_verdict
from kvfold.convert.errors import option_error
from kvfold.convert.measure.plots import Plot, plot_drift

_TEMPLATE = "report.html.jinja"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def write_report(
    folder: str,
    command: str,
    headline: str,
    lead: Sequence[str],
    tables: Sequence[Sequence[Sequence[str]]],
    plots: Sequence[Plot],
    notes: Sequence[str],
    quiet: bool,
) -> None:
    """Write the HTML page ``report.html`` to ``folder``, which is created if needed. Raises
    InputError if it cannot be written.

    Args:
        folder: the folder that --report names.
        command: the title of the page, such as "kvfold drift".
        headline: the result in one sentence.
        lead: paragraphs below the headline.
        tables: rows of cells, the header first, for each table.
        plots: the plots, each with its caption.
        notes: lines at the end, before the command line, the date and the versions.
        quiet: do not print where the page is.
    """
    from jinja2 import Environment, FileSystemLoader

    from kvfold.convert.conversion.record import get_package_versions

    installed = [f"{name} {version}" for name, version in get_package_versions().items() if version]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    page = environment.get_template(_TEMPLATE).render(
        command=command,
        headline=headline,
        lead=lead,
        tables=tables,
        plots=plots,
        notes=[
            *notes,
            shlex.join(["kvfold", *sys.argv[1:]]),
            f"{time.strftime('%Y-%m-%d %H:%M')}, {', '.join(installed)}",
        ],
    )
    file = Path(folder) / REPORT
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Names from a checkpoint may hold control characters, which HTML does not allow.
        file.write_text(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", page), encoding="utf-8")
    except OSError as error:
        raise option_error(
            "report", folder, f"cannot be written ({error.strerror}); choose another folder"
        ) from error
    if not quiet:
        print(f"wrote {file}: open it in a browser", file=sys.stderr)


def write_drift_report(
    folder: str, command: str, title: str, drift: DriftReport | None, summary: str, quiet: bool
) -> None:
    """Write the HTML page about a converted checkpoint and, if measured, its drift. ``title`` names
    the conversion; ``summary`` is the text that the terminal shows. Raises InputError if the page
    cannot be written.
    """
    lead: list[str] = []
    tables: list[Sequence[Sequence[str]]] = []
    plots: list[Plot] = []
    if drift is not None:
        saving = format_cache_saving(drift.source_cache_bytes, drift.student_cache_bytes)
        title += f": {saving} cache, {format_verdict(drift)}"
        lead = [format_metrics(drift)]
        tables = [drift.format_rows(), make_position_rows(drift)]
        plots = plot_drift(drift)
    write_report(folder, command, title, lead, tables, plots, summary.splitlines(), quiet)
