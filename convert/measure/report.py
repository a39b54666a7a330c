"""The page for ``--report``: one self-contained HTML file with the results of a command, and its
plots; matplotlib is an optional extra.
"""

import io
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.attention.drift.metrics import format_cache_saving, make_position_rows
from kvfold.attention.drift.report import DriftReport
from kvfold.convert.console import REPORT
from kvfold.convert.conversion.judgment import format_verdict
from kvfold.convert.errors import option_error

if TYPE_CHECKING:
    from kvfold.convert.measure.sweep import SweepResult

_TEMPLATE = "report.html.jinja"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_GRAY = "#7C828C"
_STYLE = Path(__file__).with_name("plots.mplstyle")
# The date would make every file differ.
_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class Plot:
    """A drawn plot with its title and an explanation.

    title: what is drawn.
    caption: what the values mean, and what a good result looks like.
    svg: an ``<svg>`` element with a transparent background, for an HTML page.
    """

    title: str
    caption: str
    svg: str


@contextmanager
def _draw_plot(plots: list[Plot], title: str, caption: str) -> Iterator[Any]:
    """Yield new axes, and add the plot that the with-block draws in them to ``plots``. The plot
    style is active, because artists get their colors when they are drawn.
    """
    from matplotlib import style

    # Not pyplot, which keeps every figure alive and looks for a display.
    from matplotlib.figure import Figure

    file = io.StringIO()
    with style.context(_STYLE):
        figure = Figure(layout="constrained")
        yield figure.subplots()
        figure.savefig(file, format="svg", transparent=True, metadata=_METADATA)
    text = file.getvalue()
    plots.append(Plot(title, caption, text[text.index("<svg") :]))


def _plot_drift_by_layer(drift: DriftReport, plots: list[Plot]) -> None:
    """Add a plot of the relative errors of attention and residual stream in each layer, on a
    logarithmic axis.
    """
    caption = (
        "Relative error against the source, of each layer's attention and of the residual stream"
        " after the layer; local: with the source's inputs, propagated: with the converted model's"
        " own inputs. Good: the residual stream's line is low and flat; a layer that stands out"
        " needs refinement."
    )
    with _draw_plot(plots, "Drift by layer", caption) as axes:
        for name in ("attention_local", "attention_propagated", "residual_propagated"):
            errors = [getattr(layer, name) for layer in drift.layers]
            axes.plot(errors, marker="o", label=name.replace("_", ", "))
        # A logarithmic axis has no place for 0: it leaves a gap.
        axes.set_yscale("log", nonpositive="mask")
        axes.set(xlabel="layer", ylabel="relative error")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()


def _plot_loss_by_position(drift: DriftReport, plots: list[Plot]) -> None:
    """Add a plot of excess loss and KL divergence by token position, with 95 % intervals."""
    stretches = drift.stretches
    caption = (
        "Excess loss and KL of the tokens at these positions, with 95 % intervals, over"
        f" {stretches[0].sequences} sequences. Good: both lines are low and flat; if both rise, the"
        " converted model makes less of a long context than its source."
    )
    with _draw_plot(plots, "Loss by position", caption) as axes:
        positions = [f"{stretch.start}-{stretch.end}" for stretch in stretches]
        for name, label in (("excess", "excess loss"), ("kl", "KL")):
            values = [getattr(stretch, name) for stretch in stretches]
            margins = [getattr(stretch, f"{name}_margin") or 0.0 for stretch in stretches]
            axes.errorbar(positions, values, margins, marker="o", label=label)
        axes.axhline(0, color=_GRAY, linewidth=0.8)
        axes.set(xlabel="position, tokens", ylabel="nats per token")
        axes.legend()


def plot_loss_by_cache(sweep: "SweepResult") -> list[Plot]:
    """A plot of each target's excess loss against its cache size, with 95 % intervals and the
    limit.
    """
    caption = (
        "Each target's loss on held-out text minus the source's, with 95 % intervals; smaller"
        " caches are further to the right. Good: far to the right and still below the dashed limit."
    )
    plots: list[Plot] = []
    with _draw_plot(plots, "Cache against loss", caption) as axes:
        for label, color, marker in (("GQA, MQA", "C0", "s"), ("MLA", "C1", "o")):
            rows = [row for row in sweep.rows if ("MLA" in row.kind) == (label == "MLA")]
            sizes = [row.cache_elements for row in rows]
            losses = [row.measured.excess for row in rows]
            margins = [row.measured.excess_margin or 0.0 for row in rows]
            axes.errorbar(sizes, losses, margins, fmt=marker, color=color, label=label)
            for row in rows:
                # Beside the point: folds on its left, MLA on its right.
                axes.annotate(
                    row.kind,
                    (row.cache_elements, row.measured.excess),
                    (-6 if marker == "s" else 6, 2),
                    textcoords="offset points",
                    ha="right" if marker == "s" else "left",
                    color=color,
                    fontsize=8,
                )
        axes.axhline(sweep.loss_limit.excess, color="C3", linestyle="--", label=sweep.limit_name)
        axes.axhline(0, color=_GRAY, linewidth=0.8)
        axes.set_xscale("log", base=2)
        ticks = sorted({sweep.cache_elements, *(row.cache_elements for row in sweep.rows)})
        savings = [f"{size}\n{100 * (1 - size / sweep.cache_elements):.3g} %" for size in ticks]
        axes.set_xticks(ticks, savings)
        axes.minorticks_off()
        # Descending: a larger saving is further to the right, where a margin holds the last name.
        axes.set_xlim(sweep.cache_elements * 1.15, ticks[0] / 1.6)
        saved = "KV-cache elements per token per layer, and the saving"
        axes.set(xlabel=saved, ylabel="excess loss, nats per token")
        axes.legend(loc="upper left")
    return plots


def write_report(
    folder: str,
    command: str,
    headline: str,
    tables: Sequence[Sequence[Sequence[str]]],
    plots: Sequence[Plot],
    summary: str,
    quiet: bool,
) -> None:
    """Write the HTML page ``report.html`` to ``folder``, which is created if needed. Raises
    InputError if it cannot be written.

    Args:
        folder: the folder that --report names.
        command: the title of the page, such as "kvfold drift".
        headline: the result in one sentence.
        tables: rows of cells, the header first, for each table.
        plots: the plots, each with its caption.
        summary: the text that the terminal shows; at the end, before the command line, the date and
            the versions.
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
        tables=tables,
        plots=plots,
        notes=[
            *summary.splitlines(),
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
    tables: list[Sequence[Sequence[str]]] = []
    plots: list[Plot] = []
    if drift is not None:
        saving = format_cache_saving(drift.source_cache_bytes, drift.student_cache_bytes)
        title += f": {saving} cache, {format_verdict(drift)}"
        tables = [drift.format_rows(), make_position_rows(drift)]
        # A plot of what was not measured, or is 0 everywhere, is left out.
        if drift.layers and not drift.identical:
            _plot_drift_by_layer(drift, plots)
        if len(drift.stretches) > 1:
            _plot_loss_by_position(drift, plots)
    write_report(folder, command, title, tables, plots, summary, quiet)
