"""Draws charts as inline SVG in the page's colors, with the values that the pointer shows; knows
nothing of runs.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import math
from collections.abc import Callable, Sequence

WIDTH, HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 12, 10, 44
_MARKS = 6  # on a line of many points
LIGHT = ("#0471fa", "#d8640f", "#004a38", "#9557ab", "#68390b", "#361f65", "#767c86")
DARK = ("#717bfc", "#d17d26", "#44c487", "#ce8be1", "#efdc4f", "#e8eeff", "#8a919c")
"""Of lines and bars, by number: each differs from every other, also for readers who lack a kind of
cone, and from the card behind it. The last, a grey, is for what has no name of its own."""
COLORS = len(LIGHT)


@dataclasses.dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
      name: in the legend.
      xs, ys: of its points, ascending by x.
      color: a number of the palette.
      dashed: for what accompanies a line, such as training beside validation.
      shape: of the marks, one of four; None draws none. They tell runs apart where colors do not.
      run: its number, where the page's legend names it and can hide it; None puts it into the
        chart's own legend.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int
    dashed: bool = False
    shape: int | None = None
    run: int | None = None


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart with lines.

    Attributes:
      x_label, y_label: with units.
      log_y: a logarithmic vertical axis.
      zero: the vertical axis begins at 0.
      limits: ends of the vertical axis; lines leave the chart there. None holds all values.
      levels: horizontal lines with a name, such as targets.
    """

    title: str
    series: Sequence[Series]
    x_label: str
    y_label: str
    log_y: bool = False
    zero: bool = False
    limits: tuple[float, float] | None = None
    levels: Sequence[tuple[str, float]] = ()


def _polygon(x: float, y: float, *corners: tuple[float, float]) -> str:
    points = " ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)
    return f'<polygon points="{points}"'


SHAPES: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"',
    lambda x, y: f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"',
    lambda x, y: _polygon(x, y, (0, -4.4), (4, 3), (-4, 3)),
    lambda x, y: _polygon(x, y, (0, -4.6), (4.6, 0), (0, 4.6), (-4.6, 0)),
)


def line_chart(chart: Chart) -> str:
    """A figure with lines; points that a logarithmic axis cannot show are left out."""
    shown = [_visible(s, chart.log_y) for s in chart.series]
    shown = [s for s in shown if s.xs]
    x, y = _axes(chart, shown)
    parts = [_grid(x, y), *(_level(name, y(value)) for name, value in chart.levels)]
    parts += [_line(s, x, y) for s in shown]
    parts.append(_labels(chart.x_label, chart.y_label))
    data = [
        {
            "name": s.name,
            "color": s.color,
            "run": s.run,
            "x": _short(s.xs),
            "y": _short(s.ys),
            "px": [round(x(v), 1) for v in s.xs],
            "py": [round(y(v), 1) for v in s.ys],
        }
        for s in shown
    ]
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(chart.title)}"'
        ' class="chart" '
        f"data-series='{html.escape(json.dumps(data), quote=True)}'>{''.join(parts)}</svg>"
    )
    own = [
        (s.name, s.color, "dash" if s.dashed else "solid", s.shape) for s in shown if s.run is None
    ]
    return figure(chart.title, svg, own if len(shown) > 1 else ())


def _axes(chart: Chart, shown: Sequence[Series]) -> tuple[Scale, Scale]:
    xs, ys = [x for s in shown for x in s.xs], [y for s in shown for y in s.ys]
    ys += [value for _, value in chart.levels]
    left, right, bottom, top = (
        float(_LEFT),
        float(WIDTH - _RIGHT),
        float(HEIGHT - _BOTTOM),
        float(_TOP),
    )
    x = Scale(
        0.0, max([0.0, *xs]) or 1.0, left, right
    )  # epochs, steps or times, up to exactly the last
    if chart.limits is not None:
        return x, Scale(*chart.limits, bottom, top, chart.log_y)
    return x, fitted(ys, bottom, top, log=chart.log_y, zero=chart.zero)


def figure(title: str, svg: str, legend: Sequence[tuple[str, int, str, int | None]] = ()) -> str:
    """A drawing with its title and a legend of (name, color, style, shape)."""
    keys = "".join(f'<span class="key">{key(*entry)}</span>' for entry in legend)
    below = f'<figcaption class="legend">{keys}</figcaption>' if keys else ""
    return f"<figure><h3>{html.escape(title)}</h3>{svg}{below}</figure>"


def key(name: str, color: int, style: str = "solid", shape: int | None = None) -> str:
    """A line as the charts draw it, and what it is."""
    return f'<i class="{style} c{color % COLORS}"></i>{_sample(shape, color)}{html.escape(name)}'


def _sample(shape: int | None, color: int) -> str:
    if shape is None:
        return ""
    mark = SHAPES[shape % len(SHAPES)](5, 5)
    return (
        f'<svg class="mark" viewBox="0 0 10 10" aria-hidden="true">{mark}'
        f' class="f{color % COLORS}"/></svg>'
    )


def stacked_bars(
    title: str, rows: Sequence[tuple[str, dict[str, float]]], unit: str, colors: dict[str, int]
) -> str:
    """Horizontal bars of parts, all to the same scale; negative parts are left out of the drawing.

    Args:
      title: above the chart.
      rows: name and parts by name.
      unit: of the values, in full.
      colors: color of each part.
    """
    totals = [sum(max(v, 0.0) for v in parts.values()) for _, parts in rows]
    scale = Scale(0.0, max([*totals, 1e-12]), 8.0, float(WIDTH - 8))
    height, marks = 12 + 46 * len(rows) + 40, []
    for index, (name, parts) in enumerate(rows):
        top, edge = 12 + 46 * index, 0.0
        words = f"{name}: {_amount(sum(parts.values()))} {unit}"
        marks.append(f'<text x="8" y="{top + 8}" class="name">{html.escape(words)}</text>')
        for part, value in parts.items():
            if value > 0:
                start, end = scale(edge), scale(edge + value)
                tip = html.escape(
                    f"{part}: {_amount(value)} {unit} ({100 * value / totals[index]:.1f} %)"
                )
                marks.append(
                    f'<rect x="{start:.1f}" y="{top + 14}" width="{max(end - start - 1, 0.5):.1f}"'
                    f' height="20" class="f{colors[part] % COLORS}"><title>{tip}</title></rect>'
                )
                edge += value
    for tick in scale.ticks():
        place = "mid" if 24 < scale(tick) < WIDTH - 24 else "end" if tick else ""
        marks.append(
            f'<text x="{scale(tick):.1f}" y="{height - 22}" class="tick'
            f' {place}">{tick_label(tick)}</text>'
        )
    marks.append(
        f'<text x="{WIDTH / 2}" y="{height - 4}" class="axis mid">{html.escape(unit)}</text>'
    )
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="{html.escape(title)}">{"".join(marks)}</svg>'
    )
    return figure(title, drawing, [(part, color, "area", None) for part, color in colors.items()])


def _amount(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _visible(series: Series, log_y: bool) -> Series:
    kept = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if y > 0 or not log_y]
    return dataclasses.replace(series, xs=[x for x, _ in kept], ys=[y for _, y in kept])


def _short(values: Sequence[float]) -> list[float]:
    return [float(f"{v:.5g}") for v in values]


def _grid(x: Scale, y: Scale) -> str:
    marks = []
    for tick in y.ticks():
        at = y(tick)
        marks.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>'
        )
        marks.append(
            f'<text x="{_LEFT - 5}" y="{at + 4:.1f}" class="tick end">{tick_label(tick)}</text>'
        )
    for tick in x.ticks(6):
        at = x(tick)
        marks.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" class="grid"/>'
        )
        marks.append(
            f'<text x="{at:.1f}" y="{HEIGHT - _BOTTOM + 15}" class="tick'
            f' mid">{tick_label(tick)}</text>'
        )
    return "".join(marks)


def _level(name: str, at: float) -> str:
    return (
        f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="level"/><text'
        f' x="{WIDTH - _RIGHT - 4}" y="{at + 13:.1f}" class="tick end">{html.escape(name)}</text>'
    )


def _line(series: Series, x: Scale, y: Scale) -> str:
    points = [(x(a), y.beyond(b)) for a, b in zip(series.xs, series.ys, strict=True)]
    top, bottom = sorted((y.start, y.end))
    color = series.color % COLORS
    style = ' stroke-dasharray="5 4"' if series.dashed else ""
    marks = []
    for piece in inside(points, top, bottom):
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in piece)
        marks.append(f'<polyline points="{path}" class="line c{color}"{style}/>')
    if len(points) == 1 or series.shape is not None:
        shape = SHAPES[(series.shape or 0) % len(SHAPES)]
        stride = max(len(points) // _MARKS, 1)
        chosen = points[color % stride :: stride]
        marks += [f'{shape(a, b)} class="f{color}"/>' for a, b in chosen if top <= b <= bottom]
    return (
        "".join(marks) if series.run is None else f'<g data-run="{series.run}">{"".join(marks)}</g>'
    )


def inside(
    points: Sequence[tuple[float, float]], top: float, bottom: float
) -> list[list[tuple[float, float]]]:
    """The pieces of a line between two heights, cut where it leaves them."""
    pieces: list[list[tuple[float, float]]] = []
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        ends = [(x0, y0), (x1, y1)]
        if max(y0, y1) < top or min(y0, y1) > bottom:
            continue
        for number, (_, b) in enumerate(ends):
            edge = min(max(b, top), bottom)
            if edge != b:
                ends[number] = (x0 + (x1 - x0) * (edge - y0) / (y1 - y0), edge)
        if pieces and pieces[-1][-1] == ends[0]:
            pieces[-1].append(ends[1])
        else:
            pieces.append(ends)
    return pieces


def _labels(x_label: str, y_label: str) -> str:
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    return (
        f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 5}" class="axis'
        f' mid">{html.escape(x_label)}</text><text x="11" y="{middle}" class="axis mid"'
        f' transform="rotate(-90 11 {middle})">{html.escape(y_label)}</text>'
    )


@dataclasses.dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high` in values, drawn from `start` to `end`; logarithmic if `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The coordinate of a value; values outside are moved to the nearer end."""
        return self.beyond(min(max(value, self.low), self.high))

    def beyond(self, value: float) -> float:
        """The coordinate of a value, also outside of the axis."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        share = ((math.log(value) if self.log else value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values on the axis: about `count` on a linear one, powers of ten (or 1, 2, 5) on a
        logarithmic one.
        """
        return (
            _log_ticks(self.low, self.high, count)
            if self.log
            else _linear_ticks(self.low, self.high, count)
        )


def fitted(
    values: Sequence[float], start: float, end: float, *, log: bool = False, zero: bool = False
) -> Scale:
    """A scale that holds all values, with a margin on a linear axis; `zero` makes a linear one
    begin at 0.

    On a logarithmic scale only positive values count.
    """
    chosen = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(chosen), max(chosen)) if chosen else (1.0, 1.0)
    if log:
        return Scale(low / 1.5, high * 1.5, start, end, log=True)
    margin = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(min(low, 0.0) if zero else low - margin, high + margin, start, end)


def _linear_ticks(low: float, high: float, count: int) -> list[float]:
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [10.0**e for e in exponents if low <= 10.0**e <= high]
    if len(powers) >= 2:
        stride = math.ceil(len(powers) / (count + 1))
        return powers[::stride]
    return [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= m * 10.0**e <= high]


def tick_label(value: float) -> str:
    """A tick's label: 0.25, 1,500, 2e-5."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def style() -> str:
    """The colors as rules of CSS: variables --c0 to --c6 by theme, lines .c0, keys and areas
    .f0.
    """
    light, dark = (
        ";".join(f"--c{n}:{value}" for n, value in enumerate(colors)) for colors in (LIGHT, DARK)
    )
    rules = [
        f":root{{{light}}}",
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}",
        f":root[data-theme=dark]{{{dark}}}",
    ]
    for n in range(COLORS):
        rules.append(
            f".c{n}{{stroke:var(--c{n})}}.key"
            f" .c{n}{{border-color:var(--c{n})}}.f{n}{{fill:var(--c{n})}}"
        )
    return "".join(rules)
