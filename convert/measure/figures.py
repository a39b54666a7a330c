"""Charts for ``--plot`` and ``--report``, drawn from results; matplotlib is an optional extra."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvfold.convert.formatting import bytes_unit, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvfold.attention.drift.report import DriftReport
    from kvfold.convert.conversion.results import (
        Choices,
        LatentSpectrum,
        Polishing,
        RotaryWorth,
        Split,
    )
    from kvfold.convert.measure.sweep import Sweep, SweepRow

_RELATIVE_ERRORS = (
    ("attention_local", "attention, local"),
    ("attention_propagated", "attention, propagated"),
    ("residual_propagated", "residual, propagated"),
)
_ROUNDING = "rounding"
_ROW_KL = (
    1e-4,
    1.0,
)  # nats: the ends of the heat map's scale, from rounding in bfloat16 to another pattern; chosen
_CONTEXTS = tuple(2**power for power in range(10, 18))
# Times the rounding floor: an axis that shows both would press larger errors into one line.
_FAR = 100
# Octaves of cache between targets of one size, whose error bars would hide each other.
_APART = 0.05

# Mid-tones, because a page shows the transparent figures on white and on near-black.
_COLORS = ["#4C7FB8", "#D0703C", "#4F9E5F", "#9A6DB8", "#C2506E", "#A88A2A"]
_INK = "#7C828C"
_STYLE: dict[str, Any] = {
    "axes.prop_cycle": f"cycler(color={_COLORS})",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.facecolor": "none",
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.5,
    "errorbar.capsize": 3,
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    # Text stays text, which is smaller than outlines and can be searched.
    "svg.fonttype": "none",
    # Equal values give equal files.
    "svg.hashsalt": "kvfold",
    **{f"{part}.color": _INK for part in ("text", "xtick", "ytick", "grid")},
    **{f"axes.{part}color": _INK for part in ("label", "edge")},
}
# The date would make every file differ.
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


@dataclass(frozen=True)
class Chart:
    """A matplotlib figure with a title and a caption that explains its values and describes a good
    result.
    """

    title: str
    figure: "Figure"
    caption: str = ""

    def svg(self) -> str:
        """The figure as an ``<svg>`` element with a transparent background, for an HTML page."""
        import matplotlib

        file = io.StringIO()
        with matplotlib.rc_context(_STYLE):
            self.figure.savefig(file, format="svg", transparent=True, metadata=_NO_METADATA)
        text = file.getvalue()
        return text[text.index("<svg") :]

    def save(self, path: str, title: str = "") -> None:
        """Write the figure to a PNG, SVG or PDF file with a white background; ``title`` replaces
        the chart's own.
        """
        import matplotlib

        metadata = {".svg": _NO_METADATA, ".pdf": {"CreationDate": None}}.get(path[-4:], {})
        with matplotlib.rc_context(_STYLE):
            self.figure.suptitle(title or self.title, fontsize=10)
            self.figure.savefig(path, dpi=140, facecolor="white", metadata=metadata)


@contextmanager
def _chart(
    title: str, caption: str, width: float = 5.6, height: float = 3.4, **grid: Any
) -> Iterator[tuple[Chart, Any]]:
    """Yield a new chart and its axes, several with ``grid``, with the style active: artists get
    their colors here.
    """
    import matplotlib

    # Not pyplot, which keeps every figure alive and looks for a display.
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        chart = Chart(title, Figure(figsize=(width, height), layout="constrained"), caption)
        yield chart, chart.figure.subplots(**grid)


def by_place(
    title: str,
    lines: Mapping[str, Sequence[float | None]],
    caption: str = "",
    place: str = "layer",
    unit: str = "relative error",
    cut: int = -1,
) -> Chart:
    """Plot lines over layers, channels or slots on a logarithmic axis, with gaps for 0, None, NaN
    and infinity.

    ``cut`` is the number of places that the budget keeps, marked by a vertical line; -1 draws no
    line.
    """
    from matplotlib.ticker import MaxNLocator

    with _chart(title, caption) as (chart, axes):
        for name, values in lines.items():
            style: dict[str, Any] = {"marker": "o" if len(values) <= 100 else ""}
            if name == _ROUNDING:
                style = {"ls": "--", "lw": 1, "color": _INK}
            # A logarithmic axis has no place for 0: nan leaves a gap.
            shown = [value if value and math.isfinite(value) else math.nan for value in values]
            axes.plot(range(len(values)), shown, label=name, **style)
        axes.set(xlabel=place, ylabel=unit, yscale="log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if cut >= 0:
            axes.axvline(cut - 0.5, ls="--", lw=1, color=_COLORS[1], label="the budget cuts here")
            axes.legend(handles=axes.lines[1:])
        elif len(lines) > 1:
            axes.legend(ncols=min(4, len(lines)), loc="lower left", bbox_to_anchor=(0, 1))
    return chart


def drift_by_layer(drift: "DriftReport") -> Chart:
    """Plot relative errors of attention and residual stream by layer, with the rounding floor if it
    is close.
    """
    lines = {
        name: [getattr(layer, key) for layer in drift.measured.layers]
        for key, name in _RELATIVE_ERRORS
    }
    floors = (
        []
        if drift.floor is None
        else [layer.residual_propagated for layer in drift.floor.measured.layers]
    )
    caption = (
        "Relative error against the source, of each layer's attention and of the residual stream"
        " after the layer; local: with the source's inputs, propagated: with the converted model's"
        " own inputs. Good: the residual stream's line is low and flat; a layer that stands out"
        " needs refinement."
    )
    if highest := max(filter(math.isfinite, floors), default=0.0):
        caption += f" Rounding alone causes at most {highest:.0e}."
        if highest * _FAR > min(
            (value for value in chain(*lines.values()) if value > 0), default=math.inf
        ):
            lines[_ROUNDING] = floors
    return by_place("Drift by layer", lines, caption)


def residual_by_layer(sweep: "Sweep") -> Chart | None:
    """Plot the error of each target's residual stream by layer; None if no error was measured or
    all are 0.
    """
    lines = {row.kind: row.distances for row in sweep.rows if any(row.distances)}
    caption = (
        "Relative error of each target's residual stream after every layer, against the source."
        " Good: a low line that rises slowly; if all targets step up at the same layer, that layer"
        " needs refinement."
    )
    return by_place("Drift by layer", lines, caption) if lines else None


def attention_rows_by_head(drift: "DriftReport") -> Chart | None:
    """Draw a heat map of the KL of each head's attention weights; None if the two models' heads do
    not correspond.
    """
    rows = [
        [math.nan if head.row_kl is None else head.row_kl for head in each.heads]
        for each in drift.measured.layers
    ]
    if not all(rows) or len(set(map(len, rows))) != 1 or not all(map(math.isfinite, chain(*rows))):
        return None
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    caption = (
        "The KL between each head's attention weights in the source and in the converted model,"
        " given the source's inputs, averaged over positions. The scale is the same on every page."
        " Good: the map is dark. A bright cell among dark ones is a head that no longer attends to"
        " the same tokens."
    )
    with _chart("Attention rows by head", caption) as (chart, axes):
        # One scale for all pages, so that two can be compared, and rounding does not look like a
        # difference.
        cells = axes.imshow(rows, aspect="auto", norm=LogNorm(*_ROW_KL, clip=True))
        axes.grid(visible=False)
        axes.set(xlabel="query head", ylabel="layer")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        chart.figure.colorbar(cells, label="nats")
    return chart


def cache_by_context(bytes_per_token: Sequence[tuple[str, float]], what: str = "") -> Chart:
    """Plot the KV cache for one sequence against its length, for each named model; ``what`` extends
    the caption.
    """
    unit, scale = bytes_unit(max(size for _, size in bytes_per_token) * _CONTEXTS[-1])
    large, small = (
        format_bytes(int(bytes_per_token[place][1] * _CONTEXTS[-1])) for place in (0, -1)
    )
    caption = (
        f"The KV cache for one sequence{what}; multiply by the batch size. At 128k tokens it is"
        f" {small} instead of {large}. Good: at your context and batch size, the lower line fits"
        " into memory along with the weights."
    )
    with _chart("Cache against context", caption) as (chart, axes):
        for name, size in bytes_per_token:
            axes.plot(
                _CONTEXTS, [size * context / scale for context in _CONTEXTS], marker="o", label=name
            )
        axes.set(xlabel="context, tokens", ylabel=f"KV cache, {unit}", yscale="log")
        axes.set_xscale("log", base=2)
        axes.set_xticks(_CONTEXTS, [f"{context // 1024}k" for context in _CONTEXTS])
        axes.legend()
    return chart


def rotary_charts(worth: "RotaryWorth") -> tuple[Chart, Chart]:
    """Plot the energy of rotation at each frequency with the part that is kept, and that of shared
    rotary keys.
    """
    total = worth.per_pair
    kept = worth.kept_per_pair
    caption = (
        "The share of the scores' energy that would be lost if the keys did not rotate at a"
        " frequency, averaged over layers. The target's rotary dims keep"
        f" {100 * sum(kept) / (sum(total) or 1.0):.1f} % of it. Good: little of the chart has the"
        " color for lost energy."
    )
    with _chart("Rotary slots by frequency", caption) as (chart, axes):
        axes.bar(range(len(total)), total, 1.0, color=_COLORS[3], label="lost")
        axes.bar(range(len(kept)), kept, 1.0, color=_COLORS[0], label="kept")
        axes.set(xlabel="rotary pair, highest frequency first", ylabel="share of score energy")
        axes.legend()
    caption = (
        "Each slot is one shared rotary key (2 dims of the cache). Slots left of the cut are kept."
        " Good: the line has fallen far before the cut; if it is still high there, more rotary dims"
        " (--rope-dim) would help."
    )
    title = "Spectrum of rotary keys, and the cut"
    place = "rotary slot, most valuable first"
    return chart, by_place(
        title, {"": worth.sorted}, caption, place, "share of score energy", worth.slots
    )


def latent_spectrum(spectrum: "LatentSpectrum") -> Chart:
    """Plot the energy of the latent's principal components in descending order, and mark how many
    are kept.
    """
    lost = spectrum.lost
    worst = max(range(len(lost)), key=lambda layer: lost[layer])
    caption = (
        "The latent's channels store values and the part of keys that rotary keys do not cover, in"
        " order of energy. Those left of the cut are kept, with"
        f" {100 * (1 - sum(lost) / len(lost)):.1f} % of the energy (in the worst layer, {worst}:"
        f" {100 * (1 - lost[worst]):.1f} %). Good: the line has fallen far before the cut; if it is"
        " still high there, a higher rank (--kv-rank) would help."
    )
    title = "Spectrum of the latent, and the cut"
    place = "channel, most energy first"
    return by_place(
        title, {"": spectrum.sorted}, caption, place, "share of energy", spectrum.channels
    )


def budget_splits(splits: Sequence["Split"]) -> Chart:
    """Plot the KL for each tried split of a budget into rank and rotary dims; trials convert only a
    few layers.
    """
    drawn = sorted(splits, key=lambda split: split.rope_dim)
    ticked = drawn[:: math.ceil(len(drawn) / 8)]
    caption = (
        "The splits of the budget into rank and rotary dims that were tried. Good: the chosen split"
        " lies at the bottom of a wide valley, so that neighboring splits, which kernels may"
        " support, cost little more."
    )
    with _chart(f"Splits of {drawn[0].kv_rank + drawn[0].rope_dim} elements", caption) as (
        chart,
        axes,
    ):
        axes.plot([split.rope_dim for split in drawn], [split.kl for split in drawn], marker="o")
        labels = [f"{split.kv_rank}\n+{split.rope_dim}" for split in ticked]
        axes.set_xticks([split.rope_dim for split in ticked], labels)
        axes.set(xlabel="rank + rotary dims", ylabel="KL, nats", yscale="log")
    return chart


def gain_by_layer(fitted: "Choices") -> Chart | None:
    """Plot each layer's error before and after refinement or the output fit; None if the run did
    neither.
    """
    errors = fitted.refinement or fitted.output_fit
    what = "refinement" if fitted.refinement else "the fit of the output projection"
    lines = {word: [getattr(error, word) for error in errors] for word in ("before", "after")}
    caption = (
        "The error of the residual stream after each layer's attention on held-out text, before"
        f" and after {what}. Good: the second line is well below the first; where they meet, {what}"
        " gained nothing."
    )
    return (
        by_place(f"What {what} gained", lines, caption, unit="relative squared error")
        if errors
        else None
    )


def polishing_curve(polish: "Polishing") -> Chart:
    """Plot the KL on held-out text against the tokens polished on, and the excess loss at
    intervals.
    """
    from matplotlib.ticker import EngFormatter

    caption = (
        "Held-out figures while all layers are trained together; the weights of the lowest KL are"
        " kept. Good: the line has become flat; while it still falls at the end, more tokens would"
        " help (--polish)."
    )
    last = polish.curve[-1]["tokens"]
    with _chart("Polishing", caption) as (chart, axes):
        axes.plot(
            [min(i * polish.tokens_per_error, last) for i in range(len(polish.errors))],
            polish.errors,
            label="KL",
        )
        places = [point["tokens"] for point in polish.curve]
        axes.plot(
            places, [point["excess"] for point in polish.curve], marker="o", label="excess loss"
        )
        axes.set(xlabel="tokens", ylabel="nats per token")
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.set_ylim(bottom=min(0.0, *(point["excess"] for point in polish.curve)))
        axes.legend()
    return chart


def excess_by_cache(sweep: "Sweep", within: float) -> Chart:
    """Plot each target's excess loss against its cache, with 95 % intervals and the limit set by
    ``--within``.
    """
    rows = [row for row in sweep.rows if math.isfinite(row.excess)]
    rows.sort(key=lambda row: (-row.cache_elements, row.excess))
    present = sweep.source.cache_elements
    ticks = sorted({present, *(row.cache_elements for row in sweep.rows)})
    caption = (
        "Each target's loss on held-out text minus the source's, with 95 % intervals; smaller"
        " caches are further to the right. Good: far to the right and still below the dashed limit."
    )
    with _chart("Cache against loss", caption, 7.2, 4.4) as (chart, axes):
        for color, (label, latent) in enumerate((("GQA, MQA", False), ("MLA", True))):
            of_kind = [row for row in rows if (row.request.to == "mla") == latent]
            if of_kind:
                _targets_of_a_kind(axes, of_kind, rows, label, color)
        limit = f"{100 * within:g} % perplexity"
        axes.axhline(math.log1p(within), color=_COLORS[4], ls="--", lw=1, label=limit)
        axes.axhline(0, color=_INK, lw=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{count}\n{100 * (1 - count / present):.3g} %" for count in ticks])
        axes.minorticks_off()
        # Descending: a larger saving is further to the right. The margin on the right holds the
        # last name.
        axes.set_xlim(present * 1.15, min(ticks) / 1.3)
        axes.margins(y=0.15)
        axes.set(
            xlabel="KV-cache elements per token per layer, and the saving",
            ylabel="excess loss, nats per token",
        )
        axes.legend(loc="upper left")
    return chart


def _targets_of_a_kind(
    axes: "Axes", rows: list["SweepRow"], every: list["SweepRow"], label: str, color: int
) -> None:
    """Draw named points with intervals, and a line through the best of each size; ``rows`` has the
    best first.
    """
    best: dict[int, tuple[float, float]] = {}
    named: dict[int, list[SweepRow]] = {}
    for row in rows:
        of_size = [other for other in every if other.cache_elements == row.cache_elements]
        place = row.cache_elements * 2 ** (-_APART * of_size.index(row))
        half = row.measured.excess_margin or 0.0
        first = label if row is rows[0] else None
        axes.errorbar(place, row.excess, half, fmt="so"[color == 0], color=f"C{color}", label=first)
        best.setdefault(row.cache_elements, (place, row.excess))
        named.setdefault(row.cache_elements, []).append(row)
    axes.plot(*zip(*best.values(), strict=True), color=f"C{color}")
    # The names of one size stand above all its error bars, worst on top.
    for size, same in named.items():
        top = max(row.excess + (row.measured.excess_margin or 0.0) for row in same)
        names = "\n".join(row.kind for row in reversed(same))
        _note(axes, names, (size, top), (0, 4), ha="center", color=f"C{color}")


def _note(
    axes: "Axes", text: str, point: tuple[float, float], points: tuple[int, int], **style: Any
) -> None:
    """Write ``text`` at an offset of ``points`` from ``point``, which is in data coordinates."""
    axes.annotate(text, point, points, textcoords="offset points", fontsize=8, **style)
