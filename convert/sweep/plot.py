"""A sweep as a picture: excess loss over the cache, folds and latents apart, with the limit that decides."""

import math
from pathlib import Path
from typing import Any

from kvfold.convert.sweep.result import Row, Sweep

_KINDS = {"gqa": ("GQA, MQA", "#5E81AC", "o"), "mla": ("MLA", "#D08770", "s")}


def draw(sweep: Sweep, path: str, within: float) -> None:
    """Draw the sweep into the file ``path``."""
    figure(sweep, within).savefig(path, dpi=140)


def figure(sweep: Sweep, within: float) -> Any:
    """The matplotlib figure. The cache is on a logarithmic axis, the original at its left end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7.6, 4.8), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots()
    for kind, (label, color, marker) in _KINDS.items():
        rows = sorted((row for row in sweep.rows if _kind(row) == kind), key=lambda row: row.elements)
        if rows:
            _series(axes, rows, label, color, marker)
    limit = math.log1p(within)
    axes.axhline(limit, color="#BF616A", ls="--", lw=1, label=f"{100 * within:g} % perplexity")
    axes.axhline(0, color="#4C566A", lw=0.8)
    _axes(axes, sweep)
    return drawn


def _kind(row: Row) -> str:
    return "mla" if row.request.to == "mla" else "gqa"


def _series(axes: Any, rows: list[Row], label: str, color: str, marker: str) -> None:
    half = [0.0 if row.interval is None else row.interval[1] - row.excess for row in rows]
    elements, excess = [row.elements for row in rows], [row.excess for row in rows]
    axes.errorbar(elements, excess, half, color=color, marker=marker, ms=5, lw=1.4, capsize=3, label=label)
    named: dict[int, list[tuple[float, float, str]]] = {}
    for row, reach in zip(rows, half, strict=True):
        named.setdefault(row.elements, []).append((row.excess, reach, row.kind))
    for size, points in named.items():  # of one size: the names in the order of the points, above all of them
        names = "\n".join(kind for _, _, kind in sorted(points, reverse=True))
        at = size, max(excess + reach for excess, reach, _ in points)
        axes.annotate(names, at, (0, 4), textcoords="offset points", ha="center", fontsize=8, color=color)


def _axes(axes: Any, sweep: Sweep) -> None:
    source, ticks = sweep.source, sorted({sweep.source.elements, *(row.elements for row in sweep.rows)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{count}\n{100 * (1 - count / source.elements):.3g} %" for count in ticks])
    axes.minorticks_off()
    axes.set_xlim(source.elements * 1.15, min(ticks) / 1.25)
    axes.set_xlabel("KV-cache elements per token per layer, and the saving")
    axes.set_ylabel("excess loss, nats per token")
    axes.set_title(f"{Path(source.name).name}: {source.kind}", loc="left", fontsize=11)
    text = f"{source.sequences} x {source.length} held-out tokens of {source.text_name}; bars: 95 % intervals"
    axes.text(1, 1.01, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=6.5, color="#777777")
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
