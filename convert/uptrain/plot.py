"""The curve of a run: drift over tokens seen."""

import json
from pathlib import Path
from typing import Any


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``log.jsonl`` before the first that is none, such as a last line that was cut short."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not _is_row(row):
            break
        rows.append(row)
    return rows


def _is_row(row: Any) -> bool:
    numbers = isinstance(row, dict) and all(isinstance(value, int | float) for value in row.values())
    return numbers and type(row.get("step")) is int and "tokens" in row


def draw_curve(rows: list[dict[str, Any]], path: str, title: str) -> None:
    """Save ``curve_figure`` as PNG, SVG or PDF."""
    curve_figure(rows, title).savefig(path, dpi=140)


def curve_figure(rows: list[dict[str, Any]], title: str) -> Any:
    """Excess loss over the teacher's (the held-out loss without one) above, the training loss below, over tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [row for row in rows if "eval_loss" in row]
    trained = [row for row in rows if "loss" in row]
    figure = Figure(figsize=(7.2, 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _held_out(upper, measured)
    point = "o" if len(trained) == 1 else ""  # a line through one point would not be seen
    losses = [row["loss"] for row in trained]
    lower.plot([row["tokens"] for row in trained], losses, color="#4C566A", lw=1.2, marker=point, ms=3.5)
    lower.set_title("training loss, nats per token", loc="left", fontsize=10)
    lower.set_xlabel("tokens seen")
    lower.xaxis.set_major_formatter(_tokens)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E9F0")
    figure.suptitle(title, fontsize=11)
    return figure


def _held_out(axes: Any, rows: list[dict[str, Any]]) -> None:
    if not rows:
        axes.set_title("held-out loss: not measured (--eval-every 0)", loc="left", fontsize=10)
        return
    name = "eval_excess" if "eval_excess" in rows[0] else "eval_loss"
    tokens, values = [row["tokens"] for row in rows], [row[name] for row in rows]
    label = "excess loss over the teacher's" if name == "eval_excess" else "loss"
    axes.plot(tokens, values, color="#5E81AC", marker="o", ms=3.5, label=label)
    if name == "eval_excess":
        divergence = [row["eval_kl"] for row in rows]
        axes.plot(tokens, divergence, color="#D08770", marker="s", ms=3, label="KL from the teacher")
        axes.axhline(values[0] / 2, color="#A3BE8C", ls="--", lw=1, label="half the excess at the start")
        axes.set_ylim(min(0, *values), 1.12 * max(*values, *divergence))
    for place in dict.fromkeys((0, len(values) - 1)):  # once where there is one point
        _value(axes, tokens[place], values[place], first=place == 0)

    axes.set_title("held-out text, nats per token", loc="left", fontsize=10)
    axes.margins(x=0.12)  # room for the numbers
    axes.legend(frameon=False, fontsize=8)


def _value(axes: Any, tokens: float, value: float, *, first: bool) -> None:
    """The number at an end of the curve, beyond it: left of the first point, right of the last."""
    style = {"textcoords": "offset points", "ha": "right" if first else "left", "va": "center", "fontsize": 8}
    axes.annotate(f"{value:.4f}", (tokens, value), (-7 if first else 7, 0), **style)


def _tokens(value: float, _: Any) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"
