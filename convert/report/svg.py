"""Charts as SVG text: axes, lines, bars and heat maps. Colors are CSS classes, so that a page has two themes.

All charts are ``WIDTH`` units wide, about the pixels of a phone, so that their text stays readable there.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 18, 18, 42
SERIES = 6  # colors: classes l0 .. l5 of lines, f0 .. f5 of areas, t0 .. t5 of texts
_LETTER, _ROW, _HIGH = 5.4, 13, 10  # units: a letter's width, a row of the legend, a line of text
_CLOSE = 24  # units: the labels of points as near as that begin behind all of them
_NARROW = 30  # a logarithmic axis with less between its ends has more marks than powers of ten
_KEY = 28  # of a line of the legend beside its name

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """A scale from values to units of the drawing. ``ticks`` are values and their texts; ``log`` to base 10."""

    label: str
    ticks: Sequence[tuple[float, str]]
    low: float
    high: float
    log: bool = False
    lined: bool = True  # whether lines across the drawing mark the ticks

    def place(self, value: float) -> float:
        """``value`` as a share of the axis, within 0 and 1."""
        low, high, value = (
            (math.log10(each) for each in (self.low, self.high, max(value, self.low)))
            if self.log
            else (
                self.low,
                self.high,
                value,
            )
        )
        return min(1.0, max(0.0, (value - low) / (high - low or 1)))


@dataclass(frozen=True)
class Line:
    """A named series. ``dashed`` for what others are compared with; ``half``: half the heights of error bars.

    ``labels`` stand beside the points. ``joined``: the points that the line goes through, if not all.
    """

    name: str
    points: Sequence[Point]
    kind: int
    dashed: bool = False
    half: Sequence[float] = ()
    labels: Sequence[str] = ()
    joined: Sequence[Point] | None = None


def log_axis(label: str, values: Sequence[float]) -> Axis:
    """A logarithmic axis around the positive ``values``: over whole decades, or from 1, 2 or 5 to 1, 2 or 5."""
    positive = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
    low, high = min(positive), max(positive)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    marks = [(factor, power) for power in powers for factor in ((1, 2, 5) if high < _NARROW * low else (1,))]
    first = max(place for place, mark in enumerate(marks) if _value(mark) <= low)
    last = min(place for place, mark in enumerate(marks) if _value(mark) >= high and place > first)
    step = max(1, math.ceil((last - first) / 6))
    ticks = [(_value(mark), _mark(*mark)) for mark in marks[first : last + 1 : step]]
    return Axis(label, ticks, _value(marks[first]), _value(marks[last]), log=True)


def _value(mark: tuple[int, int]) -> float:
    return mark[0] * 10.0 ** mark[1]


def linear_axis(label: str, values: Sequence[float]) -> Axis:
    """A linear axis over ``values`` and 0, with round ticks."""
    low, high = min(0.0, *values), max(0.0, *values)
    high = high if high > low else low + 1.0
    raw = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    digits = max(0, -math.floor(math.log10(step)))
    return Axis(
        label, [(k * step, f"{k * step:.{digits}f}") for k in range(first, last + 1)], first * step, last * step
    )


def counted_axis(label: str, count: int) -> Axis:
    """An axis of ``count`` places, 0 to ``count - 1``, half a place wider on each side."""
    step = max(1, math.ceil(count / 8))
    return Axis(label, [(k, str(k)) for k in range(0, count, step)], -0.5, count - 0.5)


def line_chart(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """Lines with their points, and a legend above."""
    drawn = "".join([*(_line(x, y, line) for line in lines), *_names(x, y, lines)])
    return _chart(title, x, y, drawn, *_legend(lines))


def bar_chart(title: str, x: Axis, y: Axis, bars: Sequence[tuple[str, Sequence[float], int]]) -> str:
    """One bar per place of ``x`` and series, later series drawn over earlier ones; ``bars``: name, heights, kind."""
    width = 0.8 * (_right(x, 1) - _right(x, 0))
    drawn = "".join(
        f'<rect class="f{kind}" x="{_right(x, place) - width / 2:.1f}" y="{_down(y, height):.1f}" width="{width:.1f}" '
        f'height="{max(0.0, _down(y, y.low) - _down(y, height)):.1f}"><title>{escape(name)}, {place}: {height:.3g}'
        "</title></rect>"
        for name, heights, kind in bars
        for place, height in enumerate(heights)
    )
    return _chart(title, x, y, drawn, *_legend([Line(name, (), kind) for name, _, kind in bars]))


def heat_map(title: str, x: Axis, y: Axis, rows: Sequence[Sequence[float]], what: str) -> str:
    """``rows[y][x]``, a stronger color where larger; the strongest is the largest of all, which is named above."""
    largest = max((value for row in rows for value in row), default=0.0) or 1.0
    width, height = _right(x, 1) - _right(x, 0), _down(y, 0) - _down(y, 1)
    cells = "".join(
        f'<rect class="f0" x="{_right(x, column) - width / 2:.2f}" y="{_down(y, place) - height / 2:.2f}" '
        f'width="{width:.2f}" height="{height:.2f}" fill-opacity="{value / largest:.3f}"><title>layer {place}, '
        f"head {column}: {value:.4g} {escape(what)}</title></rect>"
        for place, row in enumerate(rows)
        for column, value in enumerate(row)
    )
    strongest = f"strongest: {largest:.3g} {escape(what)}"
    key = f'<text x="{WIDTH - RIGHT}" y="{TOP - 5}" text-anchor="end">{strongest}</text>'
    return _chart(title, x, Axis(y.label, y.ticks, y.low, y.high, lined=False), cells, key)


def _chart(title: str, x: Axis, y: Axis, drawn: str, above: str, rows: int = 1) -> str:
    """``above``: ``rows`` lines of text or more of them upwards."""
    parts, more = "".join([*_grid(x, y), drawn, *_labels(x, y), above]), _ROW * (rows - 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-more} {WIDTH} {HEIGHT + more}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{parts}</svg>'
    )


def _right(x: Axis, value: float) -> float:
    return LEFT + x.place(value) * (WIDTH - LEFT - RIGHT)


def _down(y: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - y.place(value) * (HEIGHT - TOP - BOTTOM)


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    for value, text in y.ticks:
        at = _down(y, value)
        if y.lined:
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{LEFT - 5}" y="{at + 3.5:.1f}" text-anchor="end">{escape(text)}</text>'
    for value, text in x.ticks:
        for line, part in enumerate(text.split("\n")):
            down = HEIGHT - BOTTOM + 14 + 11 * line
            yield f'<text x="{_right(x, value):.1f}" y="{down}" text-anchor="middle">{escape(part)}</text>'


def _labels(x: Axis, y: Axis) -> Iterator[str]:
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="label" x="{middle:.0f}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x.label)}</text>'
    up = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="translate(11 {up:.0f}) rotate(-90)" text-anchor="middle"'
    yield f'<text class="label" {turned}>{escape(y.label)}</text>'


def _line(x: Axis, y: Axis, line: Line) -> str:
    places = [(_right(x, a), _down(y, b)) for a, b in line.points]
    dash = ' stroke-dasharray="4 3"' if line.dashed else ""
    joined = line.points if line.joined is None else line.joined
    path = " ".join(f"{_right(x, a):.1f},{_down(y, b):.1f}" for a, b in joined)
    parts = [f'<polyline class="l{line.kind}" points="{path}"{dash}/>'] if len(joined) > 1 else []
    for (across, value), reach in zip(line.points, line.half, strict=False):
        at = _right(x, across)
        ends = f'y1="{_down(y, value - reach):.1f}" y2="{_down(y, value + reach):.1f}"'
        parts.append(f'<line class="l{line.kind}" x1="{at:.1f}" x2="{at:.1f}" {ends}/>')
    if not line.dashed:
        parts += [f'<circle class="f{line.kind}" cx="{a:.1f}" cy="{b:.1f}" r="2.6"/>' for a, b in places]
    return "".join(parts)


def _names(x: Axis, y: Axis, lines: Sequence[Line]) -> Iterator[str]:
    """Every line's labels right of their points, left where the drawing ends; higher where they would be on another."""
    labels = [
        (_down(y, value), _right(x, across), text, line.kind)
        for line in lines
        for (across, value), text in zip(line.points, line.labels, strict=False)
    ]
    taken: list[tuple[float, float, float]] = []  # left end, right end, height
    for down, at, text, kind in sorted(labels, reverse=True):
        width = _LETTER * len(text)
        at = max(other for _, other, _, _ in labels if at <= other < at + _CLOSE)
        left = at + 6 if at + 6 + width <= WIDTH else at - 6 - width
        while any(left < end and begin < left + width and abs(down - other) < _HIGH for begin, end, other in taken):
            down -= 1
        taken.append((left, left + width, down))
        yield f'<text class="name t{kind}" x="{left:.1f}" y="{down + 3:.1f}">{escape(text)}</text>'


def _legend(lines: Sequence[Line]) -> tuple[str, int]:
    """The names above the axes, and in how many rows: the last one lies on the axes, others above it."""
    rows: list[list[Line]] = [[]]
    for line in lines:
        if LEFT + sum(map(_key_width, [*rows[-1], line])) > WIDTH and rows[-1]:
            rows.append([])
        rows[-1].append(line)
    parts = []
    for upwards, row in enumerate(reversed(rows)):
        at, down = float(LEFT), 8 - _ROW * upwards
        for line in row:
            dash = ' stroke-dasharray="4 3"' if line.dashed else ""
            ends = f'x1="{at:.0f}" x2="{at + 14:.0f}" y1="{down}" y2="{down}"'
            parts.append(f'<line class="l{line.kind} key" {ends}{dash}/>')
            parts.append(f'<text x="{at + 17:.0f}" y="{down + 3}">{escape(line.name)}</text>')
            at += _key_width(line)
    return "".join(parts), len(rows)


def _key_width(line: Line) -> float:
    return _KEY + _LETTER * len(line.name)


def _mark(factor: int, power: int) -> str:
    if -3 <= power <= 3:
        return f"{factor * 10**power:,}" if power >= 0 else f"{factor * 10.0**power:g}"
    return f"{factor}e{power}"


def values_of(lines: Sequence[Line], of: Callable[[Point], float] = lambda point: point[1]) -> list[float]:
    """All values of some lines, their error bars included, for an axis."""
    ends = [(point, reach) for line in lines for point, reach in zip(line.points, line.half, strict=False)]
    bars = [point[1] + side * reach for point, reach in ends for side in (-1, 1)]
    return [of(point) for line in lines for point in line.points] + bars
