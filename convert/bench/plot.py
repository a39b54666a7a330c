"""A bench report as a picture: decoding speed and cache, one group of bars per context and batch."""

from collections.abc import Sequence
from typing import Any

from kvfold.convert.sizes import bytes_unit

_COLORS = ("#4C566A", "#5E81AC", "#D08770", "#A3BE8C", "#B48EAD", "#EBCB8B", "#88C0D0", "#BF616A")


def draw(report: dict[str, Any], path: str) -> None:
    """Draw the report into the file ``path``."""
    figure(report).savefig(path, dpi=140)


def figure(report: dict[str, Any]) -> Any:
    """The matplotlib figure. A combination that does not fit has no bar but the text "no fit"."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = {(row["model"], row["context"], row["batch"]): row for row in report["rows"]}
    models = list(dict.fromkeys(model for model, _, _ in rows))
    pairs = sorted({(context, batch) for _, context, batch in rows})
    drawn = Figure(figsize=(max(7.0, 1.2 + 0.55 * len(pairs) * len(models)), 7.2), layout="constrained")
    FigureCanvasAgg(drawn)
    speed, cache = drawn.subplots(2, 1)
    largest = max((row.get("cache_bytes", 0) for row in rows.values()), default=0)
    unit, size = bytes_unit(largest)
    for axes, key, scale, title in (
        (speed, "decode_tokens_per_s", 1, "decoding, tokens per second"),
        (cache, "cache_bytes", size, f"cache, {unit}"),
    ):
        for place, (model, name) in enumerate(zip(models, short_names(models), strict=True)):
            values = [rows.get((model, *pair), {}).get(key) for pair in pairs]
            _bars(axes, place, name, len(models), [None if value is None else value / scale for value in values])
        axes.set_xticks(range(len(pairs)), [f"{context} × {batch}" for context, batch in pairs])
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.15)
    cache.set_xlabel("context × batch")
    drawn.legend(
        *speed.get_legend_handles_labels(), loc="outside upper center", ncols=min(4, len(models)), frameon=False
    )
    drawn.text(0.99, 0.005, f"{report['device']}, {report['dtype']}", ha="right", fontsize=7, color="#777777")
    return drawn


def short_names(labels: Sequence[str]) -> list[str]:
    """The last parts of paths, with as many folders before them as tell them apart; other labels stay."""

    def shortened(label: str, parts: int) -> str:
        path, form, rest = label.partition(" (")
        return "/".join(path.rstrip("/").split("/")[-parts:]) + form + rest

    longest = max((label.count("/") for label in labels), default=0) + 1
    ways = ([shortened(label, parts) for label in labels] for parts in range(1, longest + 1))
    return next((names for names in ways if len(set(names)) == len(set(labels))), list(labels))


def _bars(axes: Any, place: int, model: str, models: int, heights: list[float | None]) -> None:
    """The bars of the model in position ``place`` of ``models``, one in each group."""
    width = 0.8 / models
    at = [index + (place - (models - 1) / 2) * width for index in range(len(heights))]
    color = _COLORS[place % len(_COLORS)]
    bars = axes.bar(at, [height or 0 for height in heights], width * 0.92, label=model, color=color)
    axes.bar_label(bars, ["no fit" if height is None else _number(height) for height in heights], fontsize=6.5)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
