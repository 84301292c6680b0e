"""What a chart with lines holds; `svg` and `png` draw it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
      name: in the legend.
      xs: of its points, ascending.
      ys: of its points.
      color: a number of the palette.
      dashed: for what accompanies a line, such as training beside validation.
      markers: a mark on every point.
      shape: of the marks, one of four; None draws none. They tell runs apart where colors do not.
      key: whether the legend has it.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int
    dashed: bool = False
    markers: bool = False
    shape: int | None = None
    key: bool = True


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart with lines.

    Attributes:
      key: names its PNG.
      title: above it.
      series: its lines.
      x_label: with unit.
      y_label: with unit.
      log_x: a logarithmic horizontal axis; else it begins at 0.
      log_y: a logarithmic vertical axis.
      zero: the vertical axis begins at 0.
      stops: ticks of the horizontal axis; None chooses them.
      limits: ends of the vertical axis; lines leave the chart there. None holds all values.
      levels: horizontal lines with a name, such as targets.
    """

    key: str
    title: str
    series: Sequence[Series]
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    zero: bool = False
    stops: Sequence[float] | None = None
    limits: tuple[float, float] | None = None
    levels: Sequence[tuple[str, float]] = ()


def twins(series: Sequence[Series]) -> dict[int, int]:
    """Which lines lie on an earlier one of their kind point by point: their numbers, and that line's."""
    found: dict[int, int] = {}
    for number, one in enumerate(series):
        for earlier in range(number):
            other = series[earlier]
            if one.dashed == other.dashed and one.color != other.color and _same(one, other):
                found[number] = found.get(earlier, earlier)
                break
    return found


def _same(one: Series, other: Series) -> bool:
    return len(one.xs) == len(other.xs) > 0 and all(
        math.isclose(a, b, rel_tol=1e-9) for a, b in zip((*one.xs, *one.ys), (*other.xs, *other.ys), strict=True)
    )
