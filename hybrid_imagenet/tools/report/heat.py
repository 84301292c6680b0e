"""Draws a heat map whose labels keep their size on a narrow screen, with its colour bar."""

from __future__ import annotations

import html
from collections.abc import Sequence

from hybrid_imagenet.tools.report import scales

_ROW = 15  # pixels
_LABEL = 28  # characters
_TICKS = 6
_SHADES = 24
_PALEST = 0.06


def heat_map(
    title: str, rows: Sequence[tuple[str, Sequence[float | None]]], columns: Sequence[float], x_label: str, unit: str
) -> str:
    """Rows of positive values by column, on a logarithmic ramp of one color; a missing value stays empty.

    Args:
      title: above the map.
      rows: name and a value for each column.
      columns: what stands under them.
      x_label: of the columns.
      unit: of the values, under the colour bar.
    """
    values = [v for _, row in rows for v in row if v is not None and v > 0]
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    ramp = scales.Scale(low, high if high > low else low * 1.01, _PALEST, 1.0, log=True)
    cells = []
    for index, (name, row) in enumerate(rows):
        for column, value in enumerate(row):
            if value is not None and value > 0:
                tip = html.escape(f"{name}, {x_label} {columns[column]:g}: {value:.3g}")
                cells.append(
                    f'<rect x="{column}" y="{index}" width="1" height="0.93" class="f0" '
                    f'fill-opacity="{ramp(value):.2f}"><title>{tip}</title></rect>'
                )
    names = "".join(f'<div title="{html.escape(name)}">{html.escape(_short(name))}</div>' for name, _ in rows)
    count = max(len(columns), 1)
    stride = max(-(-count // _TICKS), 1)
    ticks = [(100 * (c + 0.5) / count, f"{columns[c]:g}") for c in range(0, len(columns), stride)]
    return (
        f'<figure><h3>{html.escape(title)}</h3><div class="heat"><div class="names">{names}</div>'
        f'<div><svg viewBox="0 0 {count} {len(rows)}" preserveAspectRatio="none" style="height:{_ROW * len(rows)}px" '
        f'role="img" aria-label="{html.escape(title)}">{"".join(cells)}</svg>{_ticks(ticks)}'
        f'<div class="under">{html.escape(x_label)}</div></div></div>{_bar(low, high, ramp, unit)}</figure>'
    )


def _bar(low: float, high: float, ramp: scales.Scale, unit: str) -> str:
    shades = "".join(
        f'<rect x="{n}" y="0" width="1" height="1" class="f0" '
        f'fill-opacity="{_PALEST + (1 - _PALEST) * (n + 0.5) / _SHADES:.2f}"/>'
        for n in range(_SHADES)
    )
    between = [t for t in ramp.ticks(4) if low * 1.5 < t < high / 1.5]
    ticks = [(100 * (ramp(t) - _PALEST) / (1 - _PALEST), _number(t)) for t in between]
    ticks = [(0.0, _number(low)), *ticks, (100.0, _number(high))]
    return (
        f'<figcaption class="bar"><svg viewBox="0 0 {_SHADES} 1" preserveAspectRatio="none" '
        f'shape-rendering="crispEdges" aria-hidden="true">{shades}</svg>'
        f'{_ticks(ticks)}<div class="under">{html.escape(unit)}, logarithmic</div></figcaption>'
    )


def _ticks(places: Sequence[tuple[float, str]]) -> str:
    marks = "".join(f'<span style="left:{percent:.1f}%">{html.escape(text)}</span>' for percent, text in places)
    return f'<div class="ticks">{marks}</div>'


def _short(name: str) -> str:
    half = _LABEL // 2
    return name if len(name) <= _LABEL else f"{name[: half - 1]}…{name[-half:]}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if 10 <= value < 1e6 else f"{value:.2g}"
