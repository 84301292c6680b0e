"""Draws the charts of a report as PNG files, for slides and papers."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from hybrid_imagenet.tools.report import figures, palette, times, units
from hybrid_imagenet.tools.report.chart import Chart, twins
from hybrid_imagenet.tools.report.load import Run


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


_MARKS = "os^D"


def draw(charts: Iterable[Chart], runs: Sequence[Run], directory: pathlib.Path) -> list[pathlib.Path]:
    """Writes one PNG per chart, and one each for times and trust ratios where they were recorded.

    Raises:
      OSError: if a file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for chart in charts:
        paths.append(directory / f"{chart.key}.png")
        figure = _lines(chart)
        figure.savefig(paths[-1], dpi=130)
        pyplot.close(figure)
    whole = times.run_time(runs)
    divisor, unit = units.time(max((sum(parts.values()) for _, parts in whole), default=0.0))
    scaled = [(name, {part: seconds / divisor for part, seconds in parts.items()}) for name, parts in whole]
    for key, rows, word in (("run_time", scaled, unit), ("step_time", times.step_time(runs), "milliseconds")):
        if rows:
            paths.append(_bars(directory / f"{key}.png", rows, word))
    for number, run in enumerate(runs, 1):
        found = figures.trust_ratios(run)
        if found is not None:
            paths.append(_heat_map(directory / f"trust_ratios_{number}.png", run.name, *found))
    return paths


def _lines(chart: Chart) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    twin = twins(chart.series)
    for number, series in enumerate(chart.series):
        color = palette.LIGHT[series.color % palette.COLORS]
        dotted = number in twin
        name = f"{series.name} (the same as {chart.series[twin[number]].name})" if dotted else series.name
        style = ":" if dotted else "--" if series.dashed else "-"
        shape = "" if series.shape is None and not series.markers else _MARKS[(series.shape or 0) % len(_MARKS)]
        every = 1 if series.markers else max(len(series.xs) // 6, 1)
        axes.plot(series.xs, series.ys, style, color=color, label=name if series.key else None, marker=shape,
                  markevery=every, markersize=5, linewidth=3.5 if dotted else 1.6)  # fmt: skip
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label, title=chart.title)
    axes.set_xscale("log" if chart.log_x else "linear")
    if chart.stops is not None:
        axes.set_xticks(list(chart.stops), [f"{stop:g}" for stop in chart.stops])
        axes.minorticks_off()
    axes.set_yscale("log" if chart.log_y else "linear")
    if chart.limits is not None:
        axes.set_ylim(*chart.limits)
    elif chart.zero:
        axes.set_ylim(bottom=0)
    for name, value in chart.levels:
        axes.axhline(value, color="black", linewidth=0.9, linestyle=(0, (1, 2)))
        place: dict[str, Any] = {"xy": (1, value), "xycoords": ("axes fraction", "data"), "xytext": (-4, -10)}
        axes.annotate(name, textcoords="offset points", ha="right", fontsize="small", **place)
    axes.grid(alpha=0.3)
    if len(chart.series) > 1:
        axes.legend(fontsize="small")
    return figure


def _bars(path: pathlib.Path, rows: Sequence[tuple[str, dict[str, float]]], unit: str) -> pathlib.Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.6 * len(rows)), constrained_layout=True)
    labeled = set()
    for index, (_, parts) in enumerate(rows):
        edge = 0.0
        for part, value in parts.items():
            if value > 0:
                label = None if part in labeled else part
                axes.barh(index, value, left=edge, color=palette.LIGHT[times.CAUSES[part]], label=label)
                labeled.add(part)
                edge += value
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _heat_map(
    path: pathlib.Path, name: str, rows: Sequence[tuple[str, Sequence[float | None]]], columns: Sequence[float]
) -> pathlib.Path:
    import numpy as np
    from matplotlib import colors, pyplot

    values = np.array([[v if v else np.nan for v in row] for _, row in rows], np.float64)
    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.16 * len(rows)), constrained_layout=True)
    edges = (min(columns) - 0.5, max(columns) + 0.5, len(rows) - 0.5, -0.5)
    image = axes.imshow(values, aspect="auto", norm=colors.LogNorm(), extent=edges, interpolation="nearest")
    axes.set_yticks(range(len(rows)), [layer for layer, _ in rows], fontsize=6)
    axes.set(xlabel="epoch", title=f"LARS trust ratios, {name}")
    figure.colorbar(image, label="trust ratio")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
