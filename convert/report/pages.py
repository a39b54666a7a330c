"""The pages of drift, a conversion and a sweep, from the plain values that ``--json`` writes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvfold.convert.report.figures import (
    Values,
    cache_figure,
    curve_figure,
    head_figure,
    latent_figure,
    layer_figure,
    refinement_figure,
    slot_figure,
    spectrum_figure,
    split_figure,
    sweep_layer_figure,
)
from kvfold.convert.report.page import Figure, Page

_ELEMENT_BYTES = 2  # of a cache in 16 bits, where no model says otherwise


def drift_page(drift: Values, lines: Sequence[str]) -> Page:
    """``drift`` as ``kvfold drift --json`` has it; ``lines`` say what was compared, and on which text."""
    return Page("kvfold drift", lines, totals(drift), drift_figures(drift))


def conversion_page(result: Values, lines: Sequence[str]) -> Page:
    """``result`` as ``kvfold convert --json`` has it; ``lines`` are those of its summary."""
    figures: list[Figure | None] = [] if "drift" not in result else [*drift_figures(result["drift"])]
    figures.append(refinement_figure(result))
    if worth := result.get("rotary_worth"):
        figures += [slot_figure(worth), spectrum_figure(worth)]
    if spectrum := result.get("latent_spectrum"):
        figures.append(latent_figure(spectrum))
    if splits := result.get("splits"):
        figures.append(split_figure(splits, "kl", "KL, nats"))
    table = totals(result["drift"]) if "drift" in result else []
    return Page("kvfold convert", lines, table, [each for each in figures if each is not None])


def sweep_page(sweep: Values, lines: Sequence[str]) -> Page:
    """``sweep`` as ``kvfold sweep --json`` has it; ``lines`` decide."""
    source, targets = sweep["source"], sweep["targets"]
    name = "cache_elements_per_token_per_layer"
    per_element = source["layers"] * _ELEMENT_BYTES
    caches = [(source["kind"], source["elements"] * per_element)]
    within = [row for row in targets if row["target"] == sweep["smallest"]]
    taken = within[0] if within else min(targets, key=_excess)  # the one that the sentence on the page names
    caches.append((taken["kind"], taken[name] * per_element))
    figures = [curve_figure(sweep), sweep_layer_figure(targets), cache_figure(caches, ", at 2 bytes per element")]
    figures += [split_figure(row["splits"], "error", "relative squared error") for row in targets if "splits" in row]
    head = ("target", "elements", "saving", "excess loss, nats", "KL", "top-1", "time")
    drawn = [each for each in figures if each is not None]
    return Page("kvfold sweep", lines, [head, *map(_target, targets)], drawn)


def _excess(row: Mapping[str, Any]) -> float:
    value = row["excess"]["value"]
    return math.inf if value is None else float(value)


def _target(row: Mapping[str, Any]) -> tuple[str, ...]:
    excess = row["excess"]
    margin = "" if excess["low"] is None else f" ± {(excess['high'] - excess['low']) / 2:.4f}"
    return (
        row["kind"],
        f"{row['cache_elements_per_token_per_layer']}",
        f"{100 * row['saving']:.1f} %",
        _number(excess["value"], "+.4f") + margin,
        _number(row["kl"]["value"], ".4f"),
        f"{100 * row['agreement']:.1f} %",
        f"{row['seconds']:.0f} s",
    )


def totals(drift: Values) -> list[tuple[str, ...]]:
    """The numbers at the end of a comparison."""
    if "cosine" in drift:
        cosine = drift["cosine"]
        margin = "" if cosine["margin"] is None else f" ± {cosine['margin']:.4f}"
        return [("", "drift"), ("cosine similarity of embeddings", _number(cosine["value"], ".4f") + margin)]
    excess, cache, both = drift["excess"], drift["cache_bytes_per_token"], drift.get("loss") or drift["perplexity"]
    name, form = (f"{both['name']}, nats per token", ".4f") if "name" in both else ("perplexity", ".2f")
    margin = "" if excess["margin"] is None else f" ± {excess['margin']:.4f}"
    return [
        ("", "source", "converted", "drift"),
        (name, _number(both["source"], form), _number(both["student"], form), ""),
        ("excess loss, nats per token", "", "", _number(excess["value"], "+.4f") + margin),
        ("KL, nats", "", "", _number(drift["kl"]["value"], ".4f")),
        ("top-1 agreement", "", "", f"{100 * drift['agreement']['value']:.2f} %"),
        ("cache, bytes per token", str(cache["source"]), str(cache["student"]), ""),
    ]


def drift_figures(drift: Values) -> list[Figure]:
    """The figures of every comparison."""
    cache = drift["cache_bytes_per_token"]
    caches = [("source", cache["source"]), ("converted", cache["student"])]
    figures = [
        layer_figure(drift) if drift["layers"] and not drift["identical"] else None,
        head_figure(drift),
        cache_figure(caches, "") if cache["source"] else None,
    ]
    return [each for each in figures if each is not None]


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
