"""Computes what the charts of a report show; `svg` draws them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.tools.report.load import Run
from hybrid_imagenet.tools.report.svg import COLORS, Chart, Series

_FIRST_THIRD = 1 / 3  # of a run: the steep rise, which would flatten all that follows
_WIDE = 20.0  # losses further apart than this get a logarithmic axis
_HOPELESS = 0.5  # of the best accuracy: a run below that does not stretch the axis of the others
_TIMES = ((2.0 * 3600, 3600.0, "hours"), (2 * 60.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_BYTES = ((1e9, 1e9, "GB/s"), (1e6, 1e6, "MB/s"), (0.0, 1e3, "kB/s"))
CAUSES = {
    "computation": 0,
    "computation and other": 0,
    "input": 1,
    "exposed communication": 2,
    "slowest rank": 3,
    "evaluation": 4,
    "checkpoints": 5,
    "other": 6,
}
"""Causes of time and their colors."""


def curves(runs: Sequence[Run], what: str, by: str) -> Chart | None:
    """Validation (solid) and training (dashed) accuracy or loss; None if no run has recorded any.

    The axis of accuracy begins where the runs are after their first third, so that the end can be
    read; a run that diverged leaves the chart. Training is drawn from the step records by step, and
    for a run without a whole epoch.

    Args:
      runs: one color and one shape of marks each.
      what: `top1`, `top5` or `loss`.
      by: `epoch`, `step` or `hours`.
    """
    longest = max(
        (h for run in runs for h in run.series("seconds", by="hours", steps=not run.epochs)[0]),
        default=0.0,
    )
    divisor, unit = unit_of_time(3600 * longest)
    alone = len(runs) == 1
    series = []
    for number, run in enumerate(runs):
        for part, word, dashed in (("val", "validation", False), ("train", "training", True)):
            from_steps = dashed and (by == "step" or not run.epochs)
            xs, ys = run.series(f"{part}_{what}", by=by, steps=from_steps)
            ys = ys if what == "loss" else [100 * y for y in ys]
            name = word if alone else run.name if not dashed else f"{run.name}, training"
            along = [3600 * x / divisor for x in xs] if by == "hours" else xs
            color = int(dashed) if alone else number
            shape = None if alone or dashed else number
            series.append(
                Series(
                    name,
                    along,
                    ys,
                    color,
                    dashed=dashed,
                    shape=shape,
                    run=None if alone else number,
                )
            )
    y_label = {"top1": "top-1 accuracy (%)", "top5": "top-5 accuracy (%)", "loss": "loss (nats)"}[
        what
    ]
    title = {"top1": "Top-1 accuracy", "top5": "Top-5 accuracy", "loss": "Loss"}[what]
    title += " by time" if by == "hours" else f" by {by}"
    x_label = f"{unit} since the start" if by == "hours" else by
    chart = _unless_empty(Chart(title, series, x_label, y_label))
    if chart is None:
        return None
    if what == "loss":
        losses = [
            y
            for run in _good(runs)
            for part in ("val", "train")
            for y in run.series(f"{part}_loss")[1]
            if y > 0
        ]
        apart = bool(losses) and max(losses) > _WIDE * min(losses) > 0
        return dataclasses.replace(chart, log_y=apart, limits=_around(losses, log=apart))
    levels = _targets(runs) if what == "top1" else []
    shown_values = [100 * y for run in _good(runs) for y in _after_the_rise(run, what)]
    limits = _around([*shown_values, *(value for _, value in levels)], highest=100.0)
    return dataclasses.replace(chart, levels=levels, limits=limits)


def _targets(runs: Sequence[Run]) -> list[tuple[str, float]]:
    asked = sorted(
        {target for run in runs if run.target_asked or run.imagenet for target in run.targets}
    )
    return [(f"target {100 * target:.4g} %", 100 * target) for target in asked]


def _good(runs: Sequence[Run]) -> list[Run]:
    """The runs that an axis is made for: those that have not diverged or failed, if there are
    any.
    """
    best = max((max(run.series("val_top1")[1], default=0.0) for run in runs), default=0.0)
    kept = [
        r
        for r in runs
        if not r.diverged and max(r.series("val_top1")[1], default=0.0) >= _HOPELESS * best
    ]
    return kept or list(runs)


def _after_the_rise(run: Run, what: str) -> list[float]:
    values = []
    for part in ("val", "train"):
        xs, ys = run.series(f"{part}_{what}")
        values += [y for x, y in zip(xs, ys, strict=True) if x > _FIRST_THIRD * xs[-1]]
    return values


def _around(
    values: Sequence[float], *, highest: float = math.inf, log: bool = False
) -> tuple[float, float] | None:
    """Ends of an axis that holds the values with a margin; None if there is no value."""
    if not values:
        return None
    low, high = min(values), max(values)
    if log:
        return low / 1.5, high * 1.5
    margin = max(0.08 * (high - low), 0.002 * abs(high)) or 1.0
    return max(low - margin, 0.0), max(min(high + margin, highest), high)


def learning_rates(runs: Sequence[Run]) -> Chart | None:
    """The learning rate of each run; of a single one with AdaBound's bounds as long as they
    hold.
    """
    series = [
        _of_run(runs, number, *_longer(run, "learning_rate")) for number, run in enumerate(runs)
    ]
    if len(runs) == 1:
        early = [
            [r for r in records if r.get("phase") == 0]
            for records in (runs[0].steps, runs[0].epochs)
        ]
        bounded = dataclasses.replace(runs[0], steps=early[0], epochs=early[1])
        series = [
            Series("upper bound Bu", *_longer(bounded, "upper_bound"), 1, dashed=True),
            dataclasses.replace(series[0], name="learning rate"),
            Series("lower bound Bl", *_longer(bounded, "lower_bound"), 2, dashed=True),
        ]
    return _unless_empty(
        Chart("Learning rate", series, "epoch", "learning rate per update", log_y=True)
    )


def _longer(run: Run, key: str) -> tuple[list[float], list[float]]:
    """A key against epochs, from the step records or the epochs', whichever have more of it."""
    return max(run.series(key), run.series(key, steps=True), key=lambda series: len(series[0]))


def relative_steps(runs: Sequence[Run]) -> Chart | None:
    """Relative step of LARS by epoch, beside tuned LARS at the batch of each epoch; None without
    LARS.
    """
    series = _by_run(runs, "relative_step")
    tuned: dict[float, list[tuple[float, float]]] = {}
    for run in runs:
        for record in run.epochs:
            if record.get("relative_step") is not None and record.get("global_batch"):
                step = mlperf.tuned_step(record["global_batch"])
                tuned.setdefault(record["global_batch"], []).append((float(record["epoch"]), step))
    for batch, points in sorted(tuned.items()):
        xs, ys = zip(*sorted(set(points)), strict=True)
        series.append(Series(f"tuned LARS, peak, batch {batch}", xs, ys, COLORS - 1, dashed=True))
    y_label = "relative to the weights' norm"
    return _unless_empty(Chart("Relative step of LARS", series, "epoch", y_label, log_y=True))


def _by_run(runs: Sequence[Run], key: str) -> list[Series]:
    """A series of each run; of one without a whole epoch, from its step records."""
    return [_of_run(runs, n, *run.series(key, steps=not run.epochs)) for n, run in enumerate(runs)]


def _of_run(runs: Sequence[Run], number: int, xs: Sequence[float], ys: Sequence[float]) -> Series:
    several = number if len(runs) > 1 else None
    return Series(runs[number].name, xs, ys, number, shape=several, run=several)


def throughput(runs: Sequence[Run]) -> Chart | None:
    """Images per second by epoch."""
    series = _by_run(runs, "images_per_second")
    return _unless_empty(
        Chart("Training throughput", series, "epoch", "images per second", zero=True)
    )


def processors(runs: Sequence[Run]) -> str:
    """What the ranks of the runs are: `GPUs`, or `ranks` where one of the runs had none."""
    return "GPUs" if all(run.on_gpus for run in runs) else "ranks"


def input_output(runs: Sequence[Run]) -> list[Chart | None]:
    """Bandwidth and operations per second of the program's reads by epoch, on axes that begin at
    0.
    """
    charts: list[Chart | None] = []
    for source, title in (("bytes_read", "Input bandwidth"), ("reads", "Input operations")):
        rates = []
        for run in runs:
            rows = [r for r in run.epochs if r.get(source) is not None and r.get("train_seconds")]
            rates.append(
                ([r["epoch"] for r in rows], [r[source] / r["train_seconds"] for r in rows])
            )
        largest = max((y for _, ys in rates for y in ys), default=0.0)
        divisor, unit = (
            _chosen(_BYTES, largest) if source == "bytes_read" else (1.0, "reads per second")
        )
        series = [
            _of_run(runs, n, xs, [y / divisor for y in ys]) for n, (xs, ys) in enumerate(rates)
        ]
        charts.append(
            _unless_empty(Chart(f"{title} (application reads)", series, "epoch", unit, zero=True))
        )
    return charts


def run_time(runs: Sequence[Run]) -> list[tuple[str, dict[str, float]]]:
    """Seconds of each run by cause."""
    known = [
        (run.name, run.summary["time_by_cause"]) for run in runs if run.summary.get("time_by_cause")
    ]
    return [
        (name, {cause: parts[cause] for cause in CAUSES if cause in parts}) for name, parts in known
    ]


def unit_of_time(seconds: float) -> tuple[float, str]:
    """The seconds in the unit that suits the longest of several times, and its name."""
    return _chosen(_TIMES, seconds)


def _chosen(choices: tuple[tuple[float, float, str], ...], largest: float) -> tuple[float, str]:
    return next((divisor, name) for least, divisor, name in choices if largest >= least)


def _unless_empty(chart: Chart) -> Chart | None:
    series = [s for s in chart.series if s.xs]
    return dataclasses.replace(chart, series=series) if series else None
