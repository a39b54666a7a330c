"""Plots for ``--plot`` and ``--report``; matplotlib is an optional extra."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvfold.attention.drift.report import DriftReport
    from kvfold.convert.measure.sweep import Sweep

# Octaves of cache between targets of one size, whose error bars would hide each other.
_SPACING = 0.05
# Mid-tones, because a page shows the transparent figures on white and on near-black.
_COLORS = ["#4C7FB8", "#D0703C", "#4F9E5F", "#9A6DB8"]
_GRAY = "#7C828C"
_STYLE: dict[str, Any] = {
    "axes.prop_cycle": f"cycler(color={_COLORS})",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.facecolor": "none",
    "axes.labelcolor": _GRAY,
    "axes.edgecolor": _GRAY,
    "errorbar.capsize": 3,
    "font.size": 9,
    "grid.alpha": 0.3,
    "lines.markersize": 3.5,
    "text.color": _GRAY,
    "xtick.color": _GRAY,
    "ytick.color": _GRAY,
    # Text stays text, which is smaller than outlines and can be searched.
    "svg.fonttype": "none",
    # Equal values give equal files.
    "svg.hashsalt": "kvfold",
}
# The date would make every file differ.
_SVG_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class Plot:
    """A matplotlib figure.

    title: what is drawn.
    caption: what the values mean, and what a good result looks like.
    figure: the figure.
    """

    title: str
    caption: str
    figure: "Figure"

    def to_svg(self) -> str:
        """The figure as an ``<svg>`` element with a transparent background, for an HTML page."""
        import matplotlib

        file = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            self.figure.savefig(file, format="svg", transparent=True, metadata=_SVG_METADATA)
        text = file.getvalue()
        return text[text.index("<svg") :]

    def save(self, path: str, title: str) -> None:
        """Write the figure, under ``title``, to a PNG, SVG or PDF file with a white background."""
        import matplotlib

        metadata = {".svg": _SVG_METADATA, ".pdf": {"CreationDate": None}}.get(path[-4:], {})
        with matplotlib.rc_context(_STYLE):
            # A model's name may contain "$", which would begin a formula.
            self.figure.suptitle(title, fontsize=10, parse_math=False)
            self.figure.savefig(path, dpi=140, facecolor="white", metadata=metadata)


@contextmanager
def _new_plot(
    title: str, caption: str, width: float = 5.6, height: float = 3.4
) -> Iterator[tuple[Plot, Any]]:
    """A new plot and its axes, with the style active: artists get their colors here."""
    import matplotlib

    # Not pyplot, which keeps every figure alive and looks for a display.
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        plot = Plot(title, caption, Figure(figsize=(width, height), layout="constrained"))
        yield plot, plot.figure.subplots()


def plot_drift(drift: "DriftReport") -> list[Plot]:
    """Drift by layer and loss by position, as far as they were measured and are not all 0."""
    plots = []
    if drift.measured.layers and not drift.identical:
        plots.append(plot_drift_by_layer(drift))
    if len(drift.measured.stretches) > 1:
        plots.append(plot_loss_by_position(drift))
    return plots


def plot_drift_by_layer(drift: "DriftReport") -> Plot:
    """Relative errors of attention and residual stream by layer, on a logarithmic axis."""
    from matplotlib.ticker import MaxNLocator

    caption = (
        "Relative error against the source, of each layer's attention and of the residual stream"
        " after the layer; local: with the source's inputs, propagated: with the converted model's"
        " own inputs. Good: the residual stream's line is low and flat; a layer that stands out"
        " needs refinement."
    )
    if drift.floor is not None:
        rounding = max(layer.residual_propagated for layer in drift.floor.measured.layers)
        caption += f" Rounding alone causes at most {rounding:.0e}."
    with _new_plot("Drift by layer", caption) as (plot, axes):
        for name in ("attention_local", "attention_propagated", "residual_propagated"):
            errors = [getattr(layer, name) for layer in drift.measured.layers]
            # A logarithmic axis has no place for 0: nan leaves a gap.
            values = [error if error and math.isfinite(error) else math.nan for error in errors]
            axes.plot(range(len(values)), values, marker="o", label=name.replace("_", ", "))
        axes.set(xlabel="layer", ylabel="relative error", yscale="log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
    return plot


def plot_loss_by_position(drift: "DriftReport") -> Plot:
    """Excess loss and KL by position, with 95 % intervals."""
    stretches = drift.measured.stretches
    caption = (
        "Excess loss and KL of the tokens at these positions, with 95 % intervals, over"
        f" {stretches[0].sequences} sequences. Good: both lines are low and flat; if both rise, the"
        " converted model makes less of a long context than its source."
    )
    with _new_plot("Loss by position", caption) as (plot, axes):
        positions = range(len(stretches))
        for name, label in (("excess", "excess loss"), ("kl", "KL")):
            values = [getattr(stretch, name) for stretch in stretches]
            margins = [getattr(stretch, f"{name}_margin") or 0.0 for stretch in stretches]
            axes.errorbar(positions, values, margins, marker="o", label=label)
        axes.axhline(0, color=_GRAY, linewidth=0.8)
        axes.set_xticks(positions, [f"{stretch.start}-{stretch.end}" for stretch in stretches])
        axes.set(xlabel="position, tokens", ylabel="nats per token")
        axes.legend()
    return plot


def plot_loss_by_cache(sweep: "Sweep", within: float) -> Plot:
    """Each target's excess loss against its cache, with 95 % intervals, and the limit of
    ``--within``.
    """
    source_elements = sweep.source.cache_elements
    sizes = sorted({source_elements, *(row.cache_elements for row in sweep.rows)})
    caption = (
        "Each target's loss on held-out text minus the source's, with 95 % intervals; smaller"
        " caches are further to the right. Good: far to the right and still below the dashed limit."
    )
    with _new_plot("Cache against loss", caption, 7.2, 4.4) as (plot, axes):
        _draw_targets(axes, sweep, "GQA, MQA", False)
        _draw_targets(axes, sweep, "MLA", True)
        limit = f"{100 * within:g} % perplexity"
        axes.axhline(math.log1p(within), color=_COLORS[3], linestyle="--", label=limit)
        axes.axhline(0, color=_GRAY, linewidth=0.8)
        axes.set_xscale("log", base=2)
        savings = [f"{size}\n{100 * (1 - size / source_elements):.3g} %" for size in sizes]
        axes.set_xticks(sizes, savings)
        axes.minorticks_off()
        # Descending: a larger saving is further to the right, where a margin holds the last name.
        axes.set_xlim(source_elements * 1.15, min(sizes) / 1.6)
        axes.margins(y=0.15)
        axes.set_xlabel("KV-cache elements per token per layer, and the saving")
        axes.set_ylabel("excess loss, nats per token")
        axes.legend(loc="upper left")
    return plot


def _draw_targets(axes: Any, sweep: "Sweep", label: str, latent: bool) -> None:
    """Points with intervals and names, and a line through the best target of each size."""
    color = _COLORS[latent]
    by_size: dict[int, list[Any]] = {}
    for row in sorted(sweep.rows, key=lambda row: (row.cache_elements, row.excess)):
        if (row.request.to == "mla") == latent and math.isfinite(row.excess):
            by_size.setdefault(row.cache_elements, []).append(row)
    for size, rows in by_size.items():
        margins = [row.measured.excess_margin or 0.0 for row in rows]
        for index, row in enumerate(rows):
            x = size * 2 ** (-_SPACING * (index + latent))
            axes.errorbar(x, row.excess, margins[index], fmt="so"[latent], color=color)
        # The names stand above all error bars, the worst on top.
        axes.annotate(
            "\n".join(row.kind for row in reversed(rows)),
            (size, max(row.excess + margin for row, margin in zip(rows, margins, strict=True))),
            (0, 4),
            textcoords="offset points",
            ha="left" if latent else "right",
            color=color,
            fontsize=8,
        )
    if by_size:
        best = [rows[0].excess for rows in by_size.values()]
        axes.plot(list(by_size), best, color=color, label=label)
