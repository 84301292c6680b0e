"""Draws charts as inline SVG in the page's colors, with the values that the pointer shows."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Sequence

from hybrid_imagenet.tools.report import scales

WIDTH, HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 12, 10, 44
COLORS = 8


@dataclasses.dataclass(frozen=True)
class Series:
    """One line: `color` is an index into the page's colors; `key` puts it in the legend."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int
    dashed: bool = False
    markers: bool = False
    key: bool = True


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    zero: bool = False,
    stops: Sequence[float] | None = None,
) -> str:
    """A figure with lines; points that a logarithmic axis cannot show are left out.

    Args:
      title: above the chart.
      series: at least one with a point.
      x_label: with unit.
      y_label: with unit.
      log_x: logarithmic horizontal axis, else it begins at 0.
      log_y: logarithmic vertical axis.
      zero: the vertical axis begins at 0.
      height: of the drawing, in its own units (480 wide).
    """
    shown = [_visible(s, log_x, log_y) for s in series]
    shown = [s for s in shown if s.xs]
    xs, ys = [x for s in shown for x in s.xs], [y for s in shown for y in s.ys]
    left, right = float(_LEFT), float(WIDTH - _RIGHT)
    x = scales.fit(xs, left, right, log=True) if log_x else scales.span(xs, left, right)
    y = scales.fit(ys, float(HEIGHT - _BOTTOM), float(_TOP), log=log_y, zero=zero)
    parts = [_grid(x, y, stops), *(_line(s, x, y) for s in shown), _labels(x_label, y_label)]
    data = [{"name": s.name, "color": s.color, "x": _short(s.xs), "y": _short(s.ys),
             "px": [round(x(v), 1) for v in s.xs], "py": [round(y(v), 1) for v in s.ys]} for s in shown]  # fmt: skip
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}" class="chart" '
        f"data-series='{html.escape(json.dumps(data), quote=True)}'>{''.join(parts)}</svg>"
    )
    return figure(title, svg, [(s.name, s.color, s.dashed) for s in shown if s.key])


def figure(title: str, svg: str, legend: Sequence[tuple[str, int, bool]] = ()) -> str:
    """A drawing with its title and a legend of (name, color, dashed); a single entry needs no legend."""
    keys = "".join(
        f'<span class="key"><i class="{"dash" if dashed else "solid"} c{color % COLORS}"></i>{html.escape(name)}</span>'
        for name, color, dashed in legend
    )
    below = f'<figcaption class="legend">{keys}</figcaption>' if len(legend) > 1 else ""
    return f"<figure><h3>{html.escape(title)}</h3>{svg}{below}</figure>"


def stacked_bars(title: str, rows: Sequence[tuple[str, dict[str, float]]], unit: str, colors: dict[str, int]) -> str:
    """Horizontal bars of parts, all to the same scale; negative parts are left out of the drawing.

    Args:
      title: above the chart.
      rows: name and parts by name.
      unit: of the values.
      colors: color of each part.
    """
    totals = [sum(max(v, 0.0) for v in parts.values()) for _, parts in rows]
    scale = scales.Scale(0.0, max([*totals, 1e-12]), 8.0, float(WIDTH - 8))
    height, marks = 12 + 46 * len(rows) + 22, []
    for index, (name, parts) in enumerate(rows):
        top, edge = 12 + 46 * index, 0.0
        marks.append(
            f'<text x="8" y="{top + 8}" class="name">{html.escape(name)}: {_amount(sum(parts.values()))} {unit}</text>'
        )
        for part, value in parts.items():
            if value > 0:
                start, end = scale(edge), scale(edge + value)
                tip = html.escape(f"{part}: {_amount(value)} {unit} ({100 * value / totals[index]:.1f} %)")
                marks.append(
                    f'<rect x="{start:.1f}" y="{top + 14}" width="{max(end - start - 1, 0.5):.1f}" height="20" '
                    f'class="f{colors[part] % COLORS}"><title>{tip}</title></rect>'
                )
                edge += value
    for tick in scale.ticks():
        marks.append(f'<text x="{scale(tick):.1f}" y="{height - 6}" class="tick mid">{scales.label(tick)}</text>')
    drawing = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(title)}">{"".join(marks)}</svg>'
    return figure(title, drawing, [(part, color, False) for part, color in colors.items()])


def heat_map(title: str, rows: Sequence[tuple[str, Sequence[float | None]]], columns: Sequence[float]) -> str:
    """Rows of positive values by column, on a logarithmic ramp; a missing value stays empty."""
    values = [v for _, row in rows for v in row if v is not None and v > 0]
    ramp = scales.fit(values, 0.06, 1.0, log=True)
    left, cell = 165.0, 12
    width = (WIDTH - left - 8) / max(len(columns), 1)
    height, marks = cell * len(rows) + 34, []
    for index, (name, row) in enumerate(rows):
        short = name if len(name) <= 28 else "…" + name[-27:]
        marks.append(f'<text x="{left - 4}" y="{index * cell + 9}" class="cell end">{html.escape(short)}</text>')
        for column, value in enumerate(row):
            if value is not None and value > 0:
                tip = html.escape(f"{name}, epoch {columns[column]:g}: {value:.3g}")
                marks.append(
                    f'<rect x="{left + column * width:.2f}" y="{index * cell}" width="{width + 0.3:.2f}" '
                    f'height="{cell - 1}" class="f0" fill-opacity="{ramp(value):.2f}"><title>{tip}</title></rect>'
                )
    stride = max(len(columns) // 6, 1)
    for column in range(0, len(columns), stride):
        x = left + (column + 0.5) * width
        marks.append(f'<text x="{x:.1f}" y="{height - 20}" class="tick mid">{columns[column]:g}</text>')
    marks.append(f'<text x="{(left + WIDTH) / 2}" y="{height - 4}" class="axis mid">epoch</text>')
    drawing = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(title)}">{"".join(marks)}</svg>'
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    return figure(f"{title} (from {low:.2g}, pale, to {high:.2g}, full)", drawing)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _visible(series: Series, log_x: bool, log_y: bool) -> Series:
    kept = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if (x > 0 or not log_x) and (y > 0 or not log_y)]
    return dataclasses.replace(series, xs=[x for x, _ in kept], ys=[y for _, y in kept])


def _short(values: Sequence[float]) -> list[float]:
    return [float(f"{v:.5g}") for v in values]


def _grid(x: scales.Scale, y: scales.Scale, stops: Sequence[float] | None) -> str:
    marks = []
    for tick in y.ticks():
        at = y(tick)
        marks.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
        marks.append(f'<text x="{_LEFT - 5}" y="{at + 4:.1f}" class="tick end">{scales.label(tick)}</text>')
    for tick in x.ticks(6) if stops is None else stops:
        at = x(tick)
        marks.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" class="grid"/>')
        marks.append(f'<text x="{at:.1f}" y="{HEIGHT - _BOTTOM + 15}" class="tick mid">{scales.label(tick)}</text>')
    return "".join(marks)


def _line(series: Series, x: scales.Scale, y: scales.Scale) -> str:
    points = [(x(a), y(b)) for a, b in zip(series.xs, series.ys, strict=True)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    mark = f'<polyline points="{path}" class="line c{series.color % COLORS}"{dash}/>'
    if series.markers or len(points) == 1:
        mark += "".join(
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" class="f{series.color % COLORS}"/>' for a, b in points
        )
    return mark


def _labels(x_label: str, y_label: str) -> str:
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    return (
        f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 5}" class="axis mid">{html.escape(x_label)}</text>'
        f'<text x="11" y="{middle}" class="axis mid" transform="rotate(-90 11 {middle})">{html.escape(y_label)}</text>'
    )
