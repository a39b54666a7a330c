"""The page for ``--report``: a single self-contained HTML file with the results of a command."""

import re
import shlex
import sys
import time
from collections.abc import Sequence
from html import escape
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.attention.drift.metrics import format_metrics, format_saving
from kvfold.convert.console import REPORT
from kvfold.convert.conversion.judgment import judge
from kvfold.convert.conversion.record import versions
from kvfold.convert.errors import option_error
from kvfold.convert.measure import figures
from kvfold.convert.measure.figures import Chart

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport
    from kvfold.convert.conversion.results import Conversion
    from kvfold.convert.measure.sweep import Sweep

# Sweeps convert nothing, so the cache's dtype is not known: 16 bits are usual.
_ELEMENT_BYTES = 2
# Options and small numbers do not break at their hyphens.
_WHOLE = re.compile(r"(?<![\w-])--[a-z][a-z-]*|\b[\d.]+e-\d+")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_CSS = """
:root { color-scheme: light dark; --dim: #7c828c; --rule: #8884; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 64rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 0; } p { margin: .4rem 0; overflow-wrap: anywhere; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.6rem; }
figure { margin: 0; } figcaption { color: var(--dim); font-size: .9rem; } svg { width: 100%; height: auto; }
footer { border-top: 1px solid var(--rule); margin-top: 2rem; font-size: .85rem; color: var(--dim); }
.indented { padding-left: 1.2rem; } .whole { white-space: nowrap; } .wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
@media (max-width: 40rem) {
  th, td { font-size: .75rem; padding-right: .4rem; } td:first-child { white-space: normal; }
}
"""


def write_report(html: str, folder: str, quiet: bool = False) -> None:
    """Write ``html`` to ``report.html`` in ``folder``, which is created. Raises InputError if it
    cannot be written.
    """
    file = Path(folder) / REPORT
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Names from a checkpoint may hold control characters, which HTML does not allow.
        file.write_text(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", html), encoding="utf-8")
    except OSError as error:
        raise option_error(
            "report", folder, f"cannot be written ({error.strerror}); choose another folder"
        ) from error
    if not quiet:
        print(f"wrote {file}: open it in a browser", file=sys.stderr)


def drift_page(drift: "DriftReport", lines: Sequence[str]) -> str:
    """The HTML page for ``drift``; ``lines`` name the models and the text."""
    name = drift.about.get("converted", {}).get("name", "the converted model")
    cache = format_saving(drift.source_cache_bytes, drift.student_cache_bytes)
    return _page(
        "kvfold drift",
        f"{name}: {cache} cache, {_verdict(drift)}",
        [format_metrics(drift.measured)],
        drift.table_rows(),
        _drift_charts(drift),
        lines,
    )


def conversion_page(done: "Conversion", lines: Sequence[str]) -> str:
    """The HTML page for a conversion; ``lines`` are its summary."""
    drift = done.drift
    choices = done.choices
    worth = choices.rotary_worth
    charts = [*(_drift_charts(drift) if drift else []), figures.gain_by_layer(choices)]
    if choices.polish is not None and choices.polish.curve:
        charts.append(figures.polishing_curve(choices.polish))
    if worth is not None:
        charts += figures.rotary_charts(worth)
    if choices.latent_spectrum is not None:
        charts.append(figures.latent_spectrum(choices.latent_spectrum))
    if choices.splits:
        charts.append(figures.budget_splits(choices.splits))
    what = (
        f"{done.plan.checkpoint.origin} as {done.attention.after}:"
        f" {format_saving(*vars(done.cache_elements).values())} cache"
    )
    headline, lead = (
        (f"{what}, {_verdict(drift)}", [format_metrics(drift.measured)]) if drift else (what, [])
    )
    return _page(
        "kvfold convert", headline, lead, drift.table_rows() if drift else [], charts, lines
    )


def _verdict(drift: "DriftReport") -> str:
    return "identical to the source" if drift.identical else judge(drift)


def sweep_page(sweep: "Sweep", within: float) -> str:
    """The HTML page for ``sweep``, with the smallest target whose perplexity is at most ``within``
    higher.
    """
    # The cache that is drawn belongs to the target that the decision names, else to the one with
    # the least loss.
    named = sweep.smallest(within) or sweep.nearest()
    size = sweep.source.layers * _ELEMENT_BYTES
    caches = [(each.kind, each.cache_elements * size) for each in (sweep.source, named)]
    charts = [
        figures.excess_by_cache(sweep, within),
        figures.residual_by_layer(sweep),
        figures.cache_by_context(caches, ", at 2 bytes per element"),
        *(figures.budget_splits(row.splits) for row in sweep.rows if row.splits),
    ]
    command = [shlex.join(named.command(sweep.source.name, named.request.out))]
    text = [f"measured on {sweep.source.held_out}"]
    return _page("kvfold sweep", sweep.verdict(within), command, sweep.table_rows(), charts, text)


def _drift_charts(drift: "DriftReport") -> list[Chart | None]:
    by_layer = (
        figures.drift_by_layer(drift) if drift.measured.layers and not drift.identical else None
    )
    caches = [("source", drift.source_cache_bytes), ("converted", drift.student_cache_bytes)]
    return [
        by_layer,
        figures.attention_rows_by_head(drift),
        figures.cache_by_context(caches) if drift.source_cache_bytes else None,
    ]


def _page(
    title: str,
    headline: str,
    lead: Sequence[str],
    table: Sequence[Sequence[str]],
    charts: Sequence[Chart | None],
    lines: Sequence[str],
) -> str:
    """An HTML page with a headline, a table (its first row is the header) and charts, and ``lines``
    in its foot.

    The foot also has the command, the date and the versions. All but the first line is XML.
    """
    installed = ", ".join(
        f"{name} {version}" for name, version in versions().items() if version is not None
    )
    made = [
        shlex.join(["kvfold", *sys.argv[1:]]),
        f"{time.strftime('%Y-%m-%d %H:%M')}, {installed}",
    ]
    text = _paragraphs(lead)
    foot = _paragraphs([*lines, *made])
    rows = [
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(chain(["th"], repeat("td")), table, strict=False)
    ]
    if rows:
        body = "".join(rows[1:])
        text += (
            f'<div class="wide"><table><thead>{rows[0]}</thead><tbody>{body}</tbody></table></div>'
        )
    drawn = "".join(
        f"<figure><h2>{escape(chart.title)}</h2>{chart.svg()}<figcaption>{_text(chart.caption)}</figcaption></figure>"
        for chart in charts
        if chart is not None
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head><body>"
        f"<h1>{escape(headline)}</h1>{text}<main>{drawn}</main><footer>{foot}</footer></body></html>\n"
    )


def _paragraphs(lines: Sequence[str]) -> str:
    indented = {True: ' class="indented"', False: ""}
    return "".join(
        f"<p{indented[line.startswith(' ')]}>{_text(line.strip())}</p>" for line in lines
    )


def _text(line: str) -> str:
    return _WHOLE.sub(r'<span class="whole">\g<0></span>', escape(line))
