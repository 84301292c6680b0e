"""Draws charts as inline SVG, with the values that the pointer shows.

This module does not know what a run is.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Point = tuple[float, float]
LegendEntry = tuple[str, int, str, int | None]
"""Name, color, style (`solid`, `dash` or `area`) and shape of an entry of a legend."""

# Size of a line chart in the units of its viewBox.
WIDTH = 480
HEIGHT = 270
# Margins around the plot, for the labels of the axes.
_LEFT = 66
_RIGHT = 12
_TOP = 10
_BOTTOM = 44
# Bars: the margin at the top, the distance from one row to the next, the height of a bar, and the
# space for the axis.
_BARS_TOP = 12
_BAR_ROW_HEIGHT = 46
_BAR_HEIGHT = 20
_BARS_BOTTOM = 40
_BAR_MARGIN = 8
# Marks that distinguish lines without color; more would hide the line.
_MARKS_PER_LINE = 6

LIGHT = ("#0471fa", "#d8640f", "#004a38", "#9557ab", "#68390b", "#361f65", "#767c86")
DARK = ("#717bfc", "#d17d26", "#44c487", "#ce8be1", "#efdc4f", "#e8eeff", "#8a919c")
"""Colors of lines and bars by number, for the light and the dark theme.

Each differs from every other and from the background of a card, even for readers who lack one type
of cone. The last one, a grey, is for lines that are not a run.
"""
COLORS = len(LIGHT)


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
      name: Name in the legend.
      xs: X coordinates of the points, ascending.
      ys: Y coordinates of the points.
      color: Number in the palette.
      dashed: Whether the line accompanies another, such as training next to validation.
      shape: Number of the shape of the marks, which distinguishes runs without color; None draws no
        marks.
      run: Number of the run if the legend of the page names the line and can hide it. None puts the
        line into the legend of the chart.
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
      title: Heading of the chart.
      series: Lines, in the order of drawing.
      x_label: Label of the horizontal axis, with its unit.
      y_label: Label of the vertical axis, with its unit.
      log_y: Whether the vertical axis is logarithmic.
      zero: Whether the vertical axis begins at 0.
      limits: Ends of the vertical axis; lines are clipped there. None shows all values.
      levels: Name and value of horizontal lines, such as targets.
    """

    title: str
    series: Sequence[Series]
    x_label: str
    y_label: str
    log_y: bool = False
    zero: bool = False
    limits: tuple[float, float] | None = None
    levels: Sequence[tuple[str, float]] = ()


@dataclasses.dataclass(frozen=True)
class Scale:
    """Maps values on an axis to coordinates.

    Attributes:
      low: Value at the beginning of the axis.
      high: Value at its end.
      start: Coordinate of `low`.
      end: Coordinate of `high`.
      log: Whether the axis is logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Returns the coordinate of a value; values outside the axis are moved to its end."""
        return self.unclipped(min(max(value, self.low), self.high))

    def unclipped(self, value: float) -> float:
        """Returns the coordinate of a value, which may be outside the axis."""
        low = self._linear(self.low)
        high = self._linear(self.high)
        fraction = (self._linear(value) - low) / (high - low)
        return self.start + fraction * (self.end - self.start)

    def _linear(self, value: float) -> float:
        return math.log(value) if self.log else value

    def ticks(self, count: int = 5) -> list[float]:
        """Returns round values on the axis, about `count` of them.

        A logarithmic axis has ticks at powers of ten, or at 1, 2 and 5 if it is short.
        """
        if self.log:
            return _log_ticks(self.low, self.high, count)
        return _linear_ticks(self.low, self.high, count)


def fit_scale(
    values: Sequence[float], start: float, end: float, *, log: bool = False, zero: bool = False
) -> Scale:
    """Returns a scale that shows all values with a margin.

    Args:
      values: Values to show. On a logarithmic scale, only positive ones count.
      start: Coordinate of the lowest value.
      end: Coordinate of the highest value.
      log: Whether the scale is logarithmic.
      zero: Whether a linear scale begins at 0.
    """
    shown_values = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low = min(shown_values, default=1.0)
    high = max(shown_values, default=1.0)
    if log:
        return Scale(low / 1.5, high * 1.5, start, end, log=True)
    margin = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(min(low, 0.0) if zero else low - margin, high + margin, start, end)


def _linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Returns multiples of 1, 2 or 5 times a power of ten."""
    # Sums of fractions are not exact, so a tick may miss the end of the axis by a rounding error.
    tolerance = 1e-9
    smallest_step = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(smallest_step))
    step = next(
        power * factor
        for factor in (1, 2, 5, 10)
        if power * factor >= smallest_step * (1 - tolerance)
    )
    first = math.ceil(low / step - tolerance)
    last = math.floor(high / step + tolerance)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [10.0**exponent for exponent in exponents if low <= 10.0**exponent <= high]
    if len(powers) >= 2:
        stride = math.ceil(len(powers) / (count + 1))
        return powers[::stride]
    ticks = []
    for exponent in exponents:
        for factor in (1, 2, 5):
            tick = factor * 10.0**exponent
            if low <= tick <= high:
                ticks.append(tick)
    return ticks


def tick_label(value: float) -> str:
    """Returns the label of a tick: 0.25, 1,500 or 2e-5."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def line_chart(chart: Chart) -> str:
    """Returns a figure with lines.

    Points that a logarithmic axis cannot show are omitted.
    """
    series = [_drawable(line, chart.log_y) for line in chart.series]
    series = [line for line in series if line.xs]
    x, y = _axes(chart, series)
    parts = [_grid(x, y)]
    parts += [_level(name, y(value)) for name, value in chart.levels]
    parts += [_line(line, x, y) for line in series]
    parts.append(_axis_labels(chart.x_label, chart.y_label))
    data = html.escape(json.dumps([_pointer_data(line, x, y) for line in series]), quote=True)
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(chart.title)}"'
        f" class=\"chart\" data-series='{data}'>{''.join(parts)}</svg>"
    )
    legend: list[LegendEntry] = []
    if len(series) > 1:
        legend = [_legend_entry(line) for line in series if line.run is None]
    return figure(chart.title, drawing, legend)


def _drawable(series: Series, log_y: bool) -> Series:
    """Removes the points that the axis cannot show."""
    points = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if y > 0 or not log_y]
    return dataclasses.replace(series, xs=[x for x, _ in points], ys=[y for _, y in points])


def _axes(chart: Chart, series: Sequence[Series]) -> tuple[Scale, Scale]:
    """Returns the scales of the horizontal and the vertical axis.

    The horizontal axis shows epochs, steps or times, so it begins at 0 and has no margin.
    """
    left = float(_LEFT)
    right = float(WIDTH - _RIGHT)
    top = float(_TOP)
    bottom = float(HEIGHT - _BOTTOM)
    largest_x = max([0.0, *(x for line in series for x in line.xs)])
    x_scale = Scale(0.0, largest_x or 1.0, left, right)
    if chart.limits is not None:
        return x_scale, Scale(*chart.limits, bottom, top, chart.log_y)
    values = [y for line in series for y in line.ys]
    values += [level for _, level in chart.levels]
    return x_scale, fit_scale(values, bottom, top, log=chart.log_y, zero=chart.zero)


def _pointer_data(series: Series, x: Scale, y: Scale) -> dict[str, Any]:
    """Returns the values and coordinates of a line for the script of the page."""
    return {
        "name": series.name,
        "color": series.color,
        "run": series.run,
        "x": _shorten(series.xs),
        "y": _shorten(series.ys),
        "px": [round(x(value), 1) for value in series.xs],
        "py": [round(y(value), 1) for value in series.ys],
    }


def _shorten(values: Sequence[float]) -> list[float]:
    """Rounds values to five digits, which keeps the page small."""
    return [float(f"{value:.5g}") for value in values]


def _legend_entry(series: Series) -> LegendEntry:
    return series.name, series.color, "dash" if series.dashed else "solid", series.shape


def figure(title: str, svg: str, legend: Sequence[LegendEntry] = ()) -> str:
    """Returns a drawing with its title and legend."""
    keys = "".join(f'<span class="key">{legend_key(*entry)}</span>' for entry in legend)
    caption = f'<figcaption class="legend">{keys}</figcaption>' if keys else ""
    return f"<figure><h3>{html.escape(title)}</h3>{svg}{caption}</figure>"


def legend_key(name: str, color: int, style: str = "solid", shape: int | None = None) -> str:
    """Returns a sample of a line, its mark, and its name."""
    line = f'<i class="{style} c{color % COLORS}"></i>'
    mark = "" if shape is None else _sample_mark(shape, color)
    return f"{line}{mark}{html.escape(name)}"


def _sample_mark(shape: int, color: int) -> str:
    mark = SHAPES[shape % len(SHAPES)](5, 5)
    return (
        f'<svg class="mark" viewBox="0 0 10 10" aria-hidden="true">{mark}'
        f' class="f{color % COLORS}"/></svg>'
    )


def _circle(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"'


def _square(x: float, y: float) -> str:
    return f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4"'


def _triangle(x: float, y: float) -> str:
    return _polygon(x, y, [(0, -4.4), (4, 3), (-4, 3)])


def _diamond(x: float, y: float) -> str:
    return _polygon(x, y, [(0, -4.6), (4.6, 0), (0, 4.6), (-4.6, 0)])


def _polygon(x: float, y: float, corners: Sequence[Point]) -> str:
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}"'


SHAPES: tuple[Callable[[float, float], str], ...] = (_circle, _square, _triangle, _diamond)
"""Marks by number. Each returns an element at a point that is still open for attributes."""


def _grid(x: Scale, y: Scale) -> str:
    """Returns grid lines with the labels of their ticks."""
    marks = []
    for tick in y.ticks():
        marks.append(_horizontal_line(y(tick), "grid"))
        marks.append(
            f'<text x="{_LEFT - 5}" y="{y(tick) + 4:.1f}" class="tick'
            f' end">{tick_label(tick)}</text>'
        )
    for tick in x.ticks(6):
        at = f"{x(tick):.1f}"
        marks.append(
            f'<line x1="{at}" x2="{at}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" class="grid"/>'
        )
        marks.append(
            f'<text x="{at}" y="{HEIGHT - _BOTTOM + 15}" class="tick mid">{tick_label(tick)}</text>'
        )
    return "".join(marks)


def _level(name: str, y: float) -> str:
    """Returns a horizontal line with its name below."""
    label = (
        f'<text x="{WIDTH - _RIGHT - 4}" y="{y + 13:.1f}" class="tick end">'
        f"{html.escape(name)}</text>"
    )
    return _horizontal_line(y, "level") + label


def _horizontal_line(y: float, css_class: str) -> str:
    return (
        f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="{css_class}"/>'
    )


def _line(series: Series, x: Scale, y: Scale) -> str:
    """Returns a line with its marks.

    The line of a run is in a group that the page can hide.
    """
    points = [
        (x(x_value), y.unclipped(y_value))
        for x_value, y_value in zip(series.xs, series.ys, strict=True)
    ]
    top, bottom = sorted((y.start, y.end))
    color = series.color % COLORS
    dashes = ' stroke-dasharray="5 4"' if series.dashed else ""
    elements = []
    for piece in clip_polyline(points, top, bottom):
        path = " ".join(f"{point_x:.1f},{point_y:.1f}" for point_x, point_y in piece)
        elements.append(f'<polyline points="{path}" class="line c{color}"{dashes}/>')
    # A single point has no line, so it is visible only as a mark.
    if len(points) == 1 or series.shape is not None:
        draw = SHAPES[(series.shape or 0) % len(SHAPES)]
        for point_x, point_y in _marked_points(points, color):
            if top <= point_y <= bottom:
                elements.append(f'{draw(point_x, point_y)} class="f{color}"/>')
    drawing = "".join(elements)
    if series.run is None:
        return drawing
    return f'<g data-run="{series.run}">{drawing}</g>'


def _marked_points(points: Sequence[Point], color: int) -> Sequence[Point]:
    """Returns the few points of a line that get a mark."""
    # The offset by color keeps marks of different lines apart.
    stride = max(len(points) // _MARKS_PER_LINE, 1)
    return points[color % stride :: stride]


def clip_polyline(points: Sequence[Point], top: float, bottom: float) -> list[list[Point]]:
    """Returns the pieces of a line that are between two heights."""
    pieces: list[list[Point]] = []
    for begin, end in itertools.pairwise(points):
        if max(begin[1], end[1]) < top or min(begin[1], end[1]) > bottom:
            continue
        clipped_begin = _clip_point(begin, begin, end, top, bottom)
        clipped_end = _clip_point(end, begin, end, top, bottom)
        if pieces and pieces[-1][-1] == clipped_begin:
            pieces[-1].append(clipped_end)
        else:
            pieces.append([clipped_begin, clipped_end])
    return pieces


def _clip_point(point: Point, begin: Point, end: Point, top: float, bottom: float) -> Point:
    """Moves an end of a segment along it to the edge that it is beyond, if any."""
    edge = min(max(point[1], top), bottom)
    if edge == point[1]:
        return point
    x0, y0 = begin
    x1, y1 = end
    return x0 + (x1 - x0) * (edge - y0) / (y1 - y0), edge


def _axis_labels(x_label: str, y_label: str) -> str:
    center = (_LEFT + WIDTH - _RIGHT) / 2
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    return (
        f'<text x="{center}" y="{HEIGHT - 5}" class="axis mid">{html.escape(x_label)}</text>'
        f'<text x="11" y="{middle}" class="axis mid"'
        f' transform="rotate(-90 11 {middle})">{html.escape(y_label)}</text>'
    )


def stacked_bars(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    unit: str,
    colors: Mapping[str, int],
) -> str:
    """Returns a figure with one horizontal bar per row, all to the same scale.

    Negative parts are not drawn.

    Args:
      title: Heading of the figure.
      rows: Name of each bar, and its parts by name.
      unit: Unit of the values, in full.
      colors: Number of the color of each part.
    """
    totals = [sum(max(value, 0.0) for value in parts.values()) for _, parts in rows]
    scale = Scale(0.0, max([*totals, 1e-12]), float(_BAR_MARGIN), float(WIDTH - _BAR_MARGIN))
    height = _BARS_TOP + _BAR_ROW_HEIGHT * len(rows) + _BARS_BOTTOM
    elements = []
    for index, (name, parts) in enumerate(rows):
        top = _BARS_TOP + _BAR_ROW_HEIGHT * index
        label = html.escape(f"{name}: {_amount(sum(parts.values()))} {unit}")
        elements.append(f'<text x="{_BAR_MARGIN}" y="{top + 8}" class="name">{label}</text>')
        elements += _bar(parts, top + 14, scale, totals[index], unit, colors)
    elements += _bar_ticks(scale, height - 22)
    elements.append(
        f'<text x="{WIDTH / 2}" y="{height - 4}" class="axis mid">{html.escape(unit)}</text>'
    )
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="{html.escape(title)}">{"".join(elements)}</svg>'
    )
    return figure(title, drawing, [(part, color, "area", None) for part, color in colors.items()])


def _bar(
    parts: Mapping[str, float],
    top: float,
    scale: Scale,
    total: float,
    unit: str,
    colors: Mapping[str, int],
) -> list[str]:
    """Returns the positive parts of a bar from left to right, each with a tooltip."""
    elements = []
    left_value = 0.0
    for name, value in parts.items():
        if value <= 0:
            continue
        left = scale(left_value)
        # A gap of 1 separates neighbors; a narrow part stays visible.
        width = max(scale(left_value + value) - left - 1, 0.5)
        percent = 100 * value / total
        tooltip = html.escape(f"{name}: {_amount(value)} {unit} ({percent:.1f} %)")
        elements.append(
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR_HEIGHT}"'
            f' class="f{colors[name] % COLORS}"><title>{tooltip}</title></rect>'
        )
        left_value += value
    return elements


def _bar_ticks(scale: Scale, y: float) -> list[str]:
    """Returns the labels below the bars. Those near an edge are aligned with it."""
    edge = 24
    labels = []
    for tick in scale.ticks():
        x = scale(tick)
        if edge < x < WIDTH - edge:
            alignment = "mid"
        elif tick:
            alignment = "end"
        else:
            alignment = ""
        labels.append(
            f'<text x="{x:.1f}" y="{y}" class="tick {alignment}">{tick_label(tick)}</text>'
        )
    return labels


def _amount(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def style() -> str:
    """Returns the colors as CSS.

    Variables --c0 to --c6 by theme, classes .c0 for lines and .f0 for areas. Paper has the light
    theme.
    """
    light = _color_variables(LIGHT)
    dark = _color_variables(DARK)
    rules = [
        f":root{{{light}}}",
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}",
        f"@media screen{{:root[data-theme=dark]{{{dark}}}}}",
    ]
    for number in range(COLORS):
        color = f"var(--c{number})"
        rules.append(f".c{number}{{stroke:{color}}}")
        rules.append(f".key .c{number}{{border-color:{color}}}")
        rules.append(f".f{number}{{fill:{color}}}")
    return "".join(rules)


def _color_variables(colors: Sequence[str]) -> str:
    return ";".join(f"--c{number}:{color}" for number, color in enumerate(colors))
