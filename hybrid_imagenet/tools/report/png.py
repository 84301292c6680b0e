"""Draws the charts of a report as PNG files, for slides and papers."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence

from hybrid_imagenet.tools.report import figures
from hybrid_imagenet.tools.report.load import Run


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(charts: Iterable[figures.Chart], runs: Sequence[Run], directory: pathlib.Path) -> list[pathlib.Path]:
    """Writes one PNG per chart, and one each for times and trust ratios where they were recorded.

    Raises:
      OSError: if a file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for chart in charts:
        figure, axes = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
        for series in chart.series:
            style = ("o" if series.markers else "") + ("--" if series.dashed else "-")
            axes.plot(series.xs, series.ys, style, color=f"C{series.color}", label=series.name)
        axes.set(xlabel=chart.x_label, ylabel=chart.y_label, title=chart.title)
        axes.set_xscale("log" if chart.log_x else "linear")
        if chart.stops is not None:
            axes.set_xticks(list(chart.stops), [f"{stop:g}" for stop in chart.stops])
            axes.minorticks_off()
        axes.set_yscale("log" if chart.log_y else "linear")
        if chart.zero:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(chart.series) > 1:
            axes.legend(fontsize="small")
        paths.append(directory / f"{chart.key}.png")
        figure.savefig(paths[-1], dpi=130)
        pyplot.close(figure)
    for name, rows, unit in (("run_time", figures.run_time(runs), "s"), ("step_time", figures.step_time(runs), "ms")):
        if rows:
            paths.append(_bars(directory / f"{name}.png", rows, unit))
    for number, run in enumerate(runs, 1):
        found = figures.trust_ratios(run)
        if found is not None:
            paths.append(_heat_map(directory / f"trust_ratios_{number}.png", run.name, *found))
    return paths


def _bars(path: pathlib.Path, rows: Sequence[tuple[str, dict[str, float]]], unit: str) -> pathlib.Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.6 * len(rows)), constrained_layout=True)
    labeled = set()
    for index, (_, parts) in enumerate(rows):
        edge = 0.0
        for part, value in parts.items():
            if value > 0:
                label = None if part in labeled else part
                axes.barh(index, value, left=edge, color=f"C{figures.CAUSES[part]}", label=label)
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
    figure.colorbar(image)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
