"""The page for ``--report``: a single self-contained HTML file with the same values as ``--json``."""

import math
import re
import sys
from collections.abc import Sequence
from html import escape
from itertools import chain, repeat
from pathlib import Path

from kvfold.convert.errors import InputError, opt
from kvfold.convert.measure import figures
from kvfold.convert.measure.figures import ELEMENTS, Chart, Values

FILE = "report.html"
# Sweeps convert nothing, so the cache's dtype is not known: 16 bits are usual.
_ELEMENT_BYTES = 2
# Options and small numbers do not break at their hyphens.
_WHOLE = re.compile(r"(?<![\w-])--[a-z][a-z-]*|\b[\d.]+e-\d+")
_CSS = """
:root { color-scheme: light dark; --dim: #7c828c; --rule: #8884; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 64rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 0; } p { margin: .4rem 0; overflow-wrap: anywhere; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.6rem; }
figure { margin: 0; } figcaption { color: var(--dim); font-size: .9rem; } svg { width: 100%; height: auto; }
.indented { padding-left: 1.2rem; } .whole { white-space: nowrap; } .wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""


def write_report(html: str, folder: str, quiet: bool = False) -> None:
    """Write ``html`` to ``report.html`` in ``folder``, creating the folder if needed.

    Prints the file's path to stderr unless ``quiet``. Raises InputError if the file cannot be written.
    """
    file = Path(folder) / FILE
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(html, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{opt('report', folder)} cannot be written ({error.strerror}); choose another folder"
        ) from error
    if not quiet:
        print(f"wrote {file}: open it in a browser", file=sys.stderr)


def drift_page(drift: Values, lines: Sequence[str]) -> str:
    """The HTML page for ``drift``, the values of ``kvfold drift --json``; ``lines`` name the models and the text."""
    return _page("kvfold drift", lines, totals(drift), _drift_charts(drift))


def conversion_page(result: Values, lines: Sequence[str]) -> str:
    """The HTML page for ``result``, the values of ``kvfold convert --json``; ``lines`` are the conversion's summary."""
    drift = result.get("drift")
    charts = [*(_drift_charts(drift) if drift else []), figures.gain_by_layer(result)]
    if worth := result.get("rotary_worth"):
        charts += [figures.rotary_pairs(worth), figures.rotary_spectrum(worth)]
    if spectrum := result.get("latent_spectrum"):
        charts.append(figures.latent_spectrum(spectrum))
    if splits := result.get("splits"):
        charts.append(figures.budget_splits(splits))
    return _page("kvfold convert", lines, totals(drift) if drift else [], charts)


def sweep_page(sweep: Values, lines: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    """The HTML page for ``sweep``, the values of ``kvfold sweep --json``.

    ``lines`` are the heading and the recommended target; ``table`` is the table from the terminal.
    """
    source, targets = sweep["source"], sweep["targets"]
    # The cache that is drawn belongs to the target that the decision names, else to the one with the least loss.
    finite = [row for row in targets if row["excess"]["value"] is not None]
    nearest = min(finite or targets, key=lambda row: row["excess"]["value"] or 0.0)
    named = next((row for row in targets if row["target"] == sweep["smallest"]), nearest)
    caches = [
        (kind, elements * source["layers"] * _ELEMENT_BYTES)
        for kind, elements in ((source["kind"], source["elements"]), (named["kind"], named[ELEMENTS]))
    ]
    charts = [
        figures.excess_by_cache(sweep),
        figures.residual_by_layer(targets),
        figures.cache_by_context(caches, ", at 2 bytes per element"),
        *(figures.budget_splits(row["splits"]) for row in targets if "splits" in row),
    ]
    return _page("kvfold sweep", lines, table, charts)


def totals(drift: Values) -> list[tuple[str, ...]]:
    """Table rows with the overall results in ``drift``: source, converted model, difference and rounding floor."""
    excess, perplexities = drift["excess"], [drift["perplexity"][name] for name in ("source", "student")]
    present, left = (drift["cache_bytes_per_token"][name] for name in ("source", "student"))
    losses = [number(math.log(value)) if value else "-" for value in perplexities]
    agreement = ["-" if share is None else f"{share:.2%}" for share in map(drift["agreement"].get, ("value", "floor"))]
    return [
        ("", "source", "converted", "drift", "floor"),
        ("perplexity", *map(number, perplexities), *(percent(excess[name]) for name in ("value", "floor"))),
        ("loss, nats per token", *losses, number(excess["value"], "+"), number(excess["floor"])),
        ("KL of next-token distributions, nats", "", "", *(number(drift["kl"][name]) for name in ("value", "floor"))),
        ("top-1 agreement", "", "", *agreement),
        ("cache, bytes per token", f"{present}", f"{left}", f"x {left / (present or math.nan):.3g}", "exact"),
    ]


def number(value: float | None, sign: str = "") -> str:
    """``value`` in at most 8 characters: five digits, an exponent if very small or large, or 0 if exactly zero."""
    if value is None:
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
    return "-" if excess is None else f"{number(100 * math.expm1(excess) if excess < 700 else math.inf, '+')} %"


def _drift_charts(drift: Values) -> list[Chart | None]:
    cache = drift["cache_bytes_per_token"]
    by_layer = figures.drift_by_layer(drift) if drift["layers"] and not drift["identical"] else None
    caches = [("source", cache["source"]), ("converted", cache["student"])]
    return [
        by_layer,
        figures.attention_rows_by_head(drift),
        figures.cache_by_context(caches) if cache["source"] else None,
    ]


def _page(title: str, lines: Sequence[str], table: Sequence[Sequence[str]], charts: Sequence[Chart | None]) -> str:
    """An HTML page with text, a table (its first row is the header) and charts; all but its first line is XML."""
    indented = {True: ' class="indented"', False: ""}
    text = "".join(f"<p{indented[line.startswith(' ')]}>{_text(line.strip())}</p>" for line in lines)
    rows = [
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(chain(["th"], repeat("td")), table, strict=False)
    ]
    if rows:
        body = "".join(rows[1:])
        text += f'<div class="wide"><table><thead>{rows[0]}</thead><tbody>{body}</tbody></table></div>'
    drawn = "".join(
        f"<figure><h2>{escape(chart.title)}</h2>{chart.svg()}<figcaption>{_text(chart.caption)}</figcaption></figure>"
        for chart in charts
        if chart is not None
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head><body>"
        f"<h1>{escape(title)}</h1>{text}<main>{drawn}</main></body></html>\n"
    )


def _text(line: str) -> str:
    return _WHOLE.sub(r'<span class="whole">\g<0></span>', escape(line))
