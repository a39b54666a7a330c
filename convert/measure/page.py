"""The page for ``--report``: a single self-contained HTML file with the results of a command."""

import math
import re
import shlex
import sys
import time
from collections.abc import Sequence
from html import escape
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.convert.console import REPORT
from kvfold.convert.conversion.judgment import loss_of, verdict_of
from kvfold.convert.conversion.record import percent_text, versions
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
    cache = _saving(drift.source_cache_bytes, drift.student_cache_bytes)
    return _page(
        "kvfold drift",
        f"{name}: {cache}, {_verdict(drift)}",
        _lead(drift),
        totals(drift),
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
        f" {_saving(*vars(done.cache_elements).values())}"
    )
    headline, lead = (f"{what}, {_verdict(drift)}", _lead(drift)) if drift else (what, [])
    return _page("kvfold convert", headline, lead, totals(drift) if drift else [], charts, lines)


def _saving(before: float, after: float) -> str:
    saved = 100 * (1 - after / (before or math.nan))
    return (
        "no cache measured"
        if math.isnan(saved)
        else f"{abs(saved):.1f} % {'more' if saved < 0 else 'less'} cache"
    )


def _verdict(drift: "DriftReport") -> str:
    return "identical to the source" if drift.identical else verdict_of(loss_of(drift))


def _lead(drift: "DriftReport") -> list[str]:
    """The excess loss with its interval, and excess and KL of stretches of positions."""
    excess = drift.excess
    margin = drift.measured.excess_margin
    interval = (
        ""
        if margin is None
        else f", 95 % interval {excess - margin:+.4f} to {excess + margin:+.4f}"
    )
    line = (
        f"excess loss {excess:+.4f} nats per token{interval} (perplexity"
        f" {percent_text(excess, margin)})"
    )
    return list(filter(None, [line, drift.positions_text()]))


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
    headline, *command = sweep.decision(within).splitlines()
    return _page("kvfold sweep", headline, command, sweep.cells(), charts, sweep.heading())


def totals(drift: "DriftReport") -> list[tuple[str, ...]]:
    """Table rows with the overall results in ``drift``: source, converted model, difference and
    rounding floor.
    """
    measured = drift.measured
    floor = None if drift.floor is None else drift.floor.measured
    rounding = None if floor is None else abs(floor.excess)
    losses = (number(loss) for loss in (measured.teacher_loss, measured.student_loss))
    agreement = ("-" if each is None else f"{each.agreement:.2%}" for each in (measured, floor))
    present = drift.source_cache_bytes
    left = drift.student_cache_bytes
    return [
        ("", "source", "converted", "drift", "floor"),
        ("perplexity", *map(number, drift.perplexities), percent(drift.excess), percent(rounding)),
        ("loss, nats per token", *losses, number(drift.excess, "+"), number(rounding)),
        (
            "KL of next-token distributions, nats",
            "",
            "",
            number(drift.kl),
            number(None if floor is None else floor.kl),
        ),
        ("top-1 agreement", "", "", *agreement),
        (
            "cache, bytes per token",
            f"{present}",
            f"{left}",
            f"x {left / (present or math.nan):.3g}",
            "exact",
        ),
    ]


def number(value: float | None, sign: str = "") -> str:
    """``value`` in at most 8 characters: five digits, an exponent if very small or large, or 0 if
    exactly zero.
    """
    if value is None or math.isnan(value):
        return "-"
    plus = sign if value > 0 else ""
    if value == 0 or not math.isfinite(value):
        return f"{plus}{value:.0f}"
    size = abs(value)
    if not 1e-3 <= size < 1e5:
        return f"{plus}{value:.1e}"
    return f"{plus}{value:.{max(0, 4 - int(math.log10(max(size, 1))))}f}"


def percent(excess: float | None) -> str:
    """The percentage by which ``excess`` nats of loss raise the perplexity, as text."""
    # exp overflows a float beyond 709.
    return (
        "-"
        if excess is None
        else f"{number(100 * math.expm1(excess) if excess < 700 else math.inf, '+')} %"
    )


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
