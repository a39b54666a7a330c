"""The figures of a report, each from the plain values that ``--json`` writes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvfold.convert.report.page import Figure
from kvfold.convert.report.svg import (
    SERIES,
    Axis,
    Line,
    bar_chart,
    counted_axis,
    heat_map,
    line_chart,
    linear_axis,
    log_axis,
    values_of,
)
from kvfold.convert.sizes import bytes_text, bytes_unit

Values = Mapping[str, Any]

_RESIDUALS = "residual_by_layer"
_CONTEXTS = tuple(2**power for power in range(10, 18))
_FAR = 100  # times the floor: errors above it would be pressed into a line by an axis that shows both
_NUMBERS = (
    ("attention_local", "alone"),
    ("attention_propagated", "in place"),
    ("residual_propagated", "residual stream"),
)


def layer_figure(drift: Values) -> Figure:
    """Relative errors by layer, with the rounding floor."""
    layers = drift["layers"]
    lines = [
        Line(name, [(layer["layer"], layer[key]["value"]) for layer in layers if layer[key]["value"]], kind)
        for kind, (key, name) in enumerate(_NUMBERS)
    ]
    floor = [(layer["layer"], layer[_NUMBERS[2][0]]["floor"]) for layer in layers if layer[_NUMBERS[2][0]]["floor"]]
    near = floor and max(values_of([Line("", floor, 3)])) * _FAR > min(values_of(lines), default=math.inf)
    lines += [Line("rounding", floor, 3, dashed=True)] if near else []
    rounding = f" Rounding alone gives {max(value for _, value in floor):.0e} at most." if floor else ""
    x, y = counted_axis("layer", len(layers)), log_axis("relative error", values_of(lines))
    return Figure(
        "Drift by layer",
        line_chart("relative error of attention and residual stream by layer", x, y, lines),
        "Distance from the source, as a share of its size: of each layer's attention given the source's inputs (alone) "
        "and its own (in place), and of the residual stream after it. Good: the residual stream's line is low and "
        f"flat; a layer that jumps out wants refinement.{rounding}",
    )


def sweep_layer_figure(targets: Sequence[Values]) -> Figure | None:
    """The distance of every target's residual stream by layer; None where none was measured or all are 0."""
    lines = [
        Line(
            row["kind"],
            [(layer, value) for layer, value in enumerate(row[_RESIDUALS]) if value],
            kind % SERIES,
        )
        for kind, row in enumerate(targets)
    ]
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    x, y = counted_axis("layer", len(targets[0][_RESIDUALS])), log_axis("relative error", values_of(lines))
    return Figure(
        "Drift by layer",
        line_chart("relative error of the residual stream by layer and target", x, y, lines),
        "Distance of each target's residual stream from the source's after every layer, as a share of its size. Good: "
        "a low line that rises slowly; a step up in one layer of all targets is a layer that wants refinement.",
    )


def head_figure(drift: Values) -> Figure | None:
    """KL of the attention rows of every head; None where no maps could be compared."""
    rows = [[head["row_kl"]["value"] for head in layer["heads"]] for layer in drift["layers"]]
    if not rows or not all(rows) or any(value is None for row in rows for value in row) or len(set(map(len, rows))) > 1:
        return None
    x, y = counted_axis("query head", len(rows[0])), counted_axis("layer", len(rows))
    return Figure(
        "Attention rows by head",
        heat_map("KL of attention rows by layer and head", x, y, rows, "nats"),
        "How differently each head looks at the text: the KL between the source's attention weights and the converted "
        "ones, mean over positions, on the source's inputs. Good: a small number as the strongest. A strong cell "
        "among weak ones is a head that lost what it looked at.",
    )


def cache_figure(bytes_per_token: Sequence[tuple[str, float]], what: str) -> Figure:
    """Cache against context of several models by name."""
    largest = max(size for _, size in bytes_per_token) * _CONTEXTS[-1]
    unit, scale = bytes_unit(largest)
    lines = [
        Line(name, [(context, size * context / scale) for context in _CONTEXTS], kind % SERIES)
        for kind, (name, size) in enumerate(bytes_per_token)
    ]
    ticks = [(context, f"{context // 1024}k") for context in _CONTEXTS]
    large, small = (bytes_text(int(bytes_per_token[place][1] * _CONTEXTS[-1])) for place in (0, -1))
    x = Axis("context, tokens", ticks, _CONTEXTS[0], _CONTEXTS[-1], log=True)
    return Figure(
        "Cache against context",
        line_chart("KV cache of one sequence by context", x, log_axis(f"KV cache, {unit}", values_of(lines)), lines),
        f"The KV cache of one sequence{what}; a batch takes it as often as it has sequences. At 128k tokens it is "
        f"{small} instead of {large}. Good: at your context and batch the lower line fits beside the weights.",
    )


def slot_figure(worth: Values) -> Figure:
    """Rotary slots by frequency: what rotation is worth at each, and what the target keeps."""
    total, kept = worth["per_pair"], worth["kept_per_pair"]
    x, y = counted_axis("rotary pair, highest frequency first", len(total)), linear_axis("share of score energy", total)
    bars = [("lost", total, 3), ("kept", kept, 0)]
    share = sum(kept) / (sum(total) or 1.0)
    return Figure(
        "Rotary slots by frequency",
        bar_chart("worth of rotation by frequency, and what is kept", x, y, bars),
        f"The share of the scores' energy that would be lost if a frequency's keys did not rotate, mean over layers. "
        f"The target's rotary dims keep {100 * share:.1f} % of it. Good: little is left in the color of what is lost.",
    )


def spectrum_figure(worth: Values) -> Figure:
    """The worth of rotary slots, most valuable first, and where the budget cuts."""
    values, count = worth["sorted"], worth["slots"]
    line = Line("slots", [(place, value) for place, value in enumerate(values) if value > 0], 0)
    y = log_axis("share of score energy", values_of([line]))
    cut = Line("the budget cuts here", [(count - 0.5, y.low), (count - 0.5, y.high)], 1, dashed=True)
    x = counted_axis("rotary slot, most valuable first", len(values))
    return Figure(
        "Spectrum of rotary keys, and the cut",
        line_chart("worth of rotary slots in descending order, and the cut", x, y, [line, cut]),
        "Each slot is one shared rotary key (2 dims of the cache). Those left of the cut are kept. Good: the line has "
        "fallen far before the cut; where it is still high, more rotary dims (--rope-dim) would pay.",
    )


def latent_figure(spectrum: Values) -> Figure:
    """Principal components of what the latent is to carry, most energy first, and where its channels end."""
    values, count, lost = spectrum["sorted"], spectrum["channels"], spectrum["lost"]
    line = Line("mean over layers", [(place, value) for place, value in enumerate(values) if value > 0], 0)
    y = log_axis("share of energy", values_of([line]))
    cut = Line("the budget cuts here", [(count - 0.5, y.low), (count - 0.5, y.high)], 1, dashed=True)
    worst = max(range(len(lost)), key=lambda layer: lost[layer])
    return Figure(
        "Spectrum of the latent, and the cut",
        line_chart(
            "energy of the latent's principal components in descending order, and the cut",
            counted_axis("channel, most energy first", len(values)),
            y,
            [line, cut],
        ),
        "What the rotary keys leave of keys and values is stored in the latent's channels, in order of their energy; "
        f"those left of the cut are kept and hold {100 * (1 - sum(lost) / len(lost)):.1f} % of it (in layer {worst}, "
        f"the worst, {100 * (1 - lost[worst]):.1f} %). Good: the line has fallen far before the cut; where it is still "
        "high, more rank (--kv-rank) would pay.",
    )


def split_figure(splits: Sequence[Values], name: str, unit: str) -> Figure:
    """A budget's splits and what decided between them; those that a first layer ruled out are left out."""
    most, tried = max(split.get("layers", 0) for split in splits), len(splits)
    splits = [split for split in splits if split.get("layers", 0) == most]
    ruled = f" ({tried - len(splits)} more, which one layer ruled out, are not drawn)" if tried > len(splits) else ""
    points = [(split["rope_dim"], split[name]) for split in splits]
    low, high = min(rope for rope, _ in points), max(rope for rope, _ in points)
    ticks = [(split["rope_dim"], f"{split['kv_rank']}\n+{split['rope_dim']}") for split in splits]
    every = max(1, math.ceil(len(ticks) / 8))
    margin = (high - low) / 20 or 1
    x = Axis("", ticks[::every], low - margin, high + margin)
    y = log_axis(unit, [value for _, value in points])
    return Figure(
        f"Splits of {splits[0]['kv_rank'] + splits[0]['rope_dim']} elements",
        line_chart("error by split of the budget", x, y, [Line("splits tried", points, 0)]),
        f"Splits of the budget into rank and rotary dims that were tried{ruled}. Good: the one taken lies at the "
        "bottom of a wide valley, so that its neighbors, which kernels may take, cost little more.",
    )


def refinement_figure(record: Values) -> Figure | None:
    """Errors of the layers before and after the output fit or refinement; None where there was neither."""
    name = "refinement" if record.get("refinement") else "output_fit"
    errors = record.get(name) or []
    if not errors:
        return None
    lines = [
        Line(word, [(layer, error[word]) for layer, error in enumerate(errors) if error[word] > 0], kind)
        for kind, word in enumerate(("before", "after"))
    ]
    what = "refinement" if name == "refinement" else "the fit of the output projection"
    return Figure(
        f"What {what} gained",
        line_chart(
            f"error of the residual stream by layer before and after {what}",
            counted_axis("layer", len(errors)),
            log_axis("relative squared error", values_of(lines)),
            lines,
        ),
        f"The error of the residual stream after each layer's attention on held-out text, before and after {what}. "
        "Good: the second line is well below the first; where both meet there was nothing to gain.",
    )


def curve_figure(sweep: Values) -> Figure:
    """Excess loss over cache of every target, with intervals and the limit."""
    present, lines = sweep["source"]["elements"], []
    finite = [row for row in sweep["targets"] if row["excess"]["value"] is not None]
    for kind, (name, latent) in enumerate((("GQA, MQA", False), ("MLA", True))):
        rows = [row for row in finite if (row["options"]["to"] == "mla") == latent]
        if rows:
            lines.append(_curve(name, kind, rows, finite))
    sizes = sorted({row[_ELEMENTS] for row in sweep["targets"]} | {present}, reverse=True)
    ticks = [(-math.log2(size), f"{size}") for size in sizes]
    low, last = ticks[0][0] - 0.2, ticks[-1][0]
    x = Axis("KV-cache elements per token per layer", ticks, low, last + max(0.5, _NAME_WIDTH * (last - low)))
    limit = math.log1p(sweep["within"])
    lines.append(Line(f"{100 * sweep['within']:g} % perplexity", [(x.low, limit), (x.high, limit)], 2, dashed=True))
    y = linear_axis("excess loss, nats per token", values_of(lines))
    return Figure(
        "Cache against loss",
        line_chart("excess loss of every target by cache", x, y, lines),
        "Every target's loss on held-out text beyond the source's, with 95 % intervals, smaller caches to the right. "
        "Good: far to the right and still below the dashed limit.",
    )


def _curve(name: str, kind: int, rows: Sequence[Values], every: Sequence[Values]) -> Line:
    """The targets ``rows`` of a kind, by size: a line through the best of each; those of one size beside each other."""

    def point(row: Values) -> tuple[float, float]:
        better = sum(
            other[_ELEMENTS] == row[_ELEMENTS] and other["excess"]["value"] < row["excess"]["value"] for other in every
        )
        return -math.log2(row[_ELEMENTS]) + _BESIDE * better, row["excess"]["value"]

    best = {row[_ELEMENTS]: row for row in sorted(rows, key=lambda row: -row["excess"]["value"])}
    joined = [point(best[size]) for size in sorted(best, reverse=True)]
    half = [(row["excess"]["high"] or row["excess"]["value"]) - row["excess"]["value"] for row in rows]
    return Line(name, [*map(point, rows)], kind, half=half, labels=[row["kind"] for row in rows], joined=joined)


_NAME_WIDTH = 0.28  # of the axis before the last target, whose name stands behind it
_BESIDE = 0.05  # of the logarithm of a size: error bars of targets with one size then do not hide each other
_ELEMENTS = "cache_elements_per_token_per_layer"
