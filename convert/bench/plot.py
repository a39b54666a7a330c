"""A bench report as a picture: decoding speed and cache, one group of bars per context and batch."""

from typing import Any

from kvfold.convert.sizes import bytes_unit

_COLOURS = ("#4C566A", "#5E81AC", "#D08770", "#A3BE8C", "#B48EAD", "#EBCB8B", "#88C0D0", "#BF616A")


def draw(report: dict[str, Any], path: str) -> None:
    """Writes the picture. Bars of what does not fit are left out and said to be."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = report["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    pairs = sorted({(row["context"], row["batch"]) for row in rows})
    figure = Figure(figsize=(max(7.0, 1.2 + 0.55 * len(pairs) * len(models)), 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    speed, cache = figure.subplots(2, 1)
    found = {(row["model"], row["context"], row["batch"]): row for row in rows}
    largest = max((row.get("cache_bytes", 0) for row in rows), default=0)
    name, size = bytes_unit(largest, binary=True)
    for axes, key, unit, title in (
        (speed, "decode_tokens_per_s", 1, "decoding, tokens per second"),
        (cache, "cache_bytes", size, f"cache, {name}"),
    ):
        for place, model in enumerate(models):
            _bars(axes, place, model, len(models), [found.get((model, *pair), {}) for pair in pairs], key, unit)
        axes.set_xticks(range(len(pairs)), [f"{context} × {batch}" for context, batch in pairs])
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.15)
    cache.set_xlabel("context × batch")
    figure.legend(
        *speed.get_legend_handles_labels(), loc="outside upper center", ncols=min(4, len(models)), frameon=False
    )
    figure.text(0.99, 0.005, f"{report['device']}, {report['dtype']}", ha="right", fontsize=7, color="#777777")
    figure.savefig(path, dpi=140)


def _bars(axes: Any, place: int, model: str, models: int, rows: list[dict[str, Any]], key: str, unit: float) -> None:
    width = 0.8 / models
    at = [index + (place - (models - 1) / 2) * width for index in range(len(rows))]
    heights = [row.get(key, 0) / unit for row in rows]
    bars = axes.bar(at, heights, width * 0.92, label=model, color=_COLOURS[place % len(_COLOURS)])
    texts = [_number(height) if key in row else "no fit" for row, height in zip(rows, heights, strict=True)]
    axes.bar_label(bars, texts, fontsize=6.5)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
