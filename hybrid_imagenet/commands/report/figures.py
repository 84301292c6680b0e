"""Prepares the charts of a report from runs; `svg` draws them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.commands.report.load import LoadedRun
from hybrid_imagenet.commands.report.svg import Chart, Series

# Accuracy rises steeply in the first third of a run. An axis that shows it would flatten the rest.
_STEEP_FRACTION = 1 / 3
# If the largest loss is this many times the smallest, the axis is logarithmic.
_MAX_LINEAR_RATIO = 20.0
# A run whose accuracy is below this fraction of the best run's has failed. It does not stretch the
# axis of the others.
_FAILED_FRACTION = 0.5
# Each unit: the smallest value it is used for, its divisor and its name.
_TIME_UNITS = ((2.0 * 3600, 3600.0, "hours"), (2 * 60.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_BANDWIDTH_UNITS = ((1e9, 1e9, "GB/s"), (1e6, 1e6, "MB/s"), (0.0, 1e3, "kB/s"))
_TITLES = {"top1": "Top-1 accuracy", "top5": "Top-5 accuracy", "loss": "Loss"}
_Y_LABELS = {"top1": "top-1 accuracy (%)", "top5": "top-5 accuracy (%)", "loss": "loss (nats)"}

CAUSE_COLORS = {
    "computation": 0,
    "computation and other": 0,
    "input": 1,
    "exposed communication": 2,
    "slowest rank": 3,
    "evaluation": 4,
    "checkpoints": 5,
    "other": 6,
}
"""Causes of time in the order of the bars, and the number of their color."""


def metric_chart(runs: Sequence[LoadedRun], metric: str, by: str) -> Chart | None:
    """Charts validation (solid) and training (dashed) accuracy or loss of each run.

    The axis of accuracy begins where the runs are after their first third, so that the end can be
    read. A run that diverged may leave the chart.

    Args:
      runs: Each gets a color and a shape of marks.
      metric: `top1`, `top5` or `loss`.
      by: `epoch`, `step` or `hours`.

    Returns:
      The chart; None if no run has recorded the metric.
    """
    longest_hours = max(
        (
            hours
            for run in runs
            for hours in run.series("seconds", by="hours", from_steps=not run.epochs)[0]
        ),
        default=0.0,
    )
    seconds_per_unit, time_unit_name = time_unit(3600 * longest_hours)
    series = []
    for number, run in enumerate(runs):
        for is_training in (False, True):
            xs, ys = _metric_series(run, metric, by, is_training=is_training)
            if by == "hours":
                xs = [3600 * x / seconds_per_unit for x in xs]
            series.append(_metric_line(runs, number, xs, ys, is_training=is_training))
    if by == "hours":
        title = f"{_TITLES[metric]} by time"
        x_label = f"{time_unit_name} since the start"
    else:
        title = f"{_TITLES[metric]} by {by}"
        x_label = by
    chart = _without_empty_series(Chart(title, series, x_label, _Y_LABELS[metric]))
    if chart is None:
        return None
    if metric == "loss":
        return _with_loss_axis(chart, runs)
    return _with_accuracy_axis(chart, runs, metric)


def _metric_series(
    run: LoadedRun, metric: str, by: str, *, is_training: bool
) -> tuple[list[float], list[float]]:
    """Returns a metric of training or validation; accuracy in percent.

    Training is read from the step records if the chart is by step, or if the run has not finished
    an epoch.
    """
    part = "train" if is_training else "val"
    from_steps = is_training and (by == "step" or not run.epochs)
    xs, ys = run.series(f"{part}_{metric}", by=by, from_steps=from_steps)
    if metric != "loss":
        ys = [100 * y for y in ys]
    return xs, ys


def _metric_line(
    runs: Sequence[LoadedRun],
    number: int,
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    is_training: bool,
) -> Series:
    """Returns the line of a run. With several runs, the color shows the run."""
    if len(runs) == 1:
        name = "training" if is_training else "validation"
        return Series(name, xs, ys, color=int(is_training), dashed=is_training)
    run_name = runs[number].name
    return Series(
        name=f"{run_name}, training" if is_training else run_name,
        xs=xs,
        ys=ys,
        color=number,
        dashed=is_training,
        shape=None if is_training else number,
        run=number,
    )


def _with_loss_axis(chart: Chart, runs: Sequence[LoadedRun]) -> Chart:
    """Limits the axis to the losses of the runs that did not fail."""
    losses = [
        loss
        for run in _runs_that_set_axes(runs)
        for key in ("val_loss", "train_loss")
        for loss in run.series(key)[1]
        if loss > 0
    ]
    is_log = bool(losses) and max(losses) > _MAX_LINEAR_RATIO * min(losses)
    return dataclasses.replace(chart, log_y=is_log, limits=_axis_limits(losses, log=is_log))


def _with_accuracy_axis(chart: Chart, runs: Sequence[LoadedRun], metric: str) -> Chart:
    """Limits the axis to targets and later accuracies of the runs that did not fail."""
    targets = _target_levels(runs) if metric == "top1" else []
    values = [
        100 * value
        for run in _runs_that_set_axes(runs)
        for value in _values_after_steep_rise(run, metric)
    ]
    values += [level for _, level in targets]
    return dataclasses.replace(chart, levels=targets, limits=_axis_limits(values, highest=100.0))


def _target_levels(runs: Sequence[LoadedRun]) -> list[tuple[str, float]]:
    """Returns the name and the percentage of each target that means something."""
    targets = {target for run in runs if run.has_meaningful_targets for target in run.targets}
    return [(f"target {100 * target:.4g} %", 100 * target) for target in sorted(targets)]


def _runs_that_set_axes(runs: Sequence[LoadedRun]) -> list[LoadedRun]:
    """Returns the runs that have not diverged or failed; all runs if there are none."""
    best = max((_best_accuracy(run) for run in runs), default=0.0)
    good_runs = [
        run
        for run in runs
        if run.divergence_record is None and _best_accuracy(run) >= _FAILED_FRACTION * best
    ]
    return good_runs or list(runs)


def _best_accuracy(run: LoadedRun) -> float:
    _, accuracies = run.series("val_top1")
    return max(accuracies, default=0.0)


def _values_after_steep_rise(run: LoadedRun, metric: str) -> list[float]:
    values = []
    for key in (f"val_{metric}", f"train_{metric}"):
        xs, ys = run.series(key)
        values += [y for x, y in zip(xs, ys, strict=True) if x > _STEEP_FRACTION * xs[-1]]
    return values


def _axis_limits(
    values: Sequence[float], *, highest: float = math.inf, log: bool = False
) -> tuple[float, float] | None:
    """Returns the ends of an axis that shows all values; None if there are none.

    Args:
      values: At least 0.
      highest: The axis does not go beyond it, unless a value does.
      log: Whether the axis is logarithmic.
    """
    if not values:
        return None
    low = min(values)
    high = max(values)
    if log:
        return low / 1.5, high * 1.5
    margin = max(0.08 * (high - low), 0.002 * abs(high)) or 1.0
    return max(low - margin, 0.0), max(min(high + margin, highest), high)


def learning_rate_chart(runs: Sequence[LoadedRun]) -> Chart | None:
    """Charts the learning rate of each run; for a single run also AdaBound's bounds."""
    series = []
    for number, run in enumerate(runs):
        xs, ys = _longer_series(run, "learning_rate")
        series.append(_run_line(runs, number, xs, ys))
    if len(runs) == 1:
        learning_rate = dataclasses.replace(series[0], name="learning rate")
        series = [
            _bound_line(runs[0], "upper_bound", "upper bound Bu", color=1),
            learning_rate,
            _bound_line(runs[0], "lower_bound", "lower bound Bl", color=2),
        ]
    return _without_empty_series(
        Chart("Learning rate", series, "epoch", "learning rate per update", log_y=True)
    )


def _bound_line(run: LoadedRun, key: str, name: str, color: int) -> Series:
    """Returns a bound of AdaBound for the epochs in which it acts (phase 0)."""
    adabound = dataclasses.replace(
        run, steps=_records_of_adabound(run.steps), epochs=_records_of_adabound(run.epochs)
    )
    xs, ys = _longer_series(adabound, key)
    return Series(name, xs, ys, color, dashed=True)


def _records_of_adabound(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record.get("phase") == 0]


def _longer_series(run: LoadedRun, key: str) -> tuple[list[float], list[float]]:
    """Returns a key by epoch, from those records that have more values of it."""
    of_epochs = run.series(key)
    of_steps = run.series(key, from_steps=True)
    return of_steps if len(of_steps[0]) > len(of_epochs[0]) else of_epochs


def throughput_chart(runs: Sequence[LoadedRun]) -> Chart | None:
    """Charts images per second by epoch."""
    series = _run_lines(runs, "images_per_second")
    return _without_empty_series(
        Chart("Training throughput", series, "epoch", "images per second", zero=True)
    )


def input_charts(runs: Sequence[LoadedRun]) -> list[Chart | None]:
    """Charts bytes per second and reads per second of the program, by epoch."""
    bytes_read = _rates(runs, "bytes_read")
    largest = max((rate for _, rates in bytes_read for rate in rates), default=0.0)
    divisor, unit = _choose_unit(_BANDWIDTH_UNITS, largest)
    bandwidth = [(epochs, [rate / divisor for rate in rates]) for epochs, rates in bytes_read]
    return [
        _input_chart(runs, "Input bandwidth", unit, bandwidth),
        _input_chart(runs, "Input operations", "reads per second", _rates(runs, "reads")),
    ]


def _rates(runs: Sequence[LoadedRun], key: str) -> list[tuple[list[float], list[float]]]:
    """Returns the epochs of each run, and the key per second of training."""
    rates_by_run = []
    for run in runs:
        records = [
            record
            for record in run.epochs
            if record.get(key) is not None and record.get("train_seconds")
        ]
        epochs = [record["epoch"] for record in records]
        rates = [record[key] / record["train_seconds"] for record in records]
        rates_by_run.append((epochs, rates))
    return rates_by_run


def _input_chart(
    runs: Sequence[LoadedRun],
    title: str,
    unit: str,
    rates_by_run: Sequence[tuple[list[float], list[float]]],
) -> Chart | None:
    series = [
        _run_line(runs, number, epochs, rates)
        for number, (epochs, rates) in enumerate(rates_by_run)
    ]
    return _without_empty_series(
        Chart(f"{title} (application reads)", series, "epoch", unit, zero=True)
    )


def _run_lines(runs: Sequence[LoadedRun], key: str) -> list[Series]:
    """Returns a line for each run.

    It is from the step records if the run has not finished an epoch.
    """
    lines = []
    for number, run in enumerate(runs):
        xs, ys = run.series(key, from_steps=not run.epochs)
        lines.append(_run_line(runs, number, xs, ys))
    return lines


def _run_line(
    runs: Sequence[LoadedRun], number: int, xs: Sequence[float], ys: Sequence[float]
) -> Series:
    """Returns the line of a run. With several runs it has marks, and can be hidden."""
    run_number = number if len(runs) > 1 else None
    return Series(runs[number].name, xs, ys, color=number, shape=run_number, run=run_number)


def _without_empty_series(chart: Chart) -> Chart | None:
    """Removes series without points; None if no series is left."""
    series = [line for line in chart.series if line.xs]
    return dataclasses.replace(chart, series=series) if series else None


def seconds_by_cause(runs: Sequence[LoadedRun]) -> list[tuple[str, dict[str, float]]]:
    """Returns the name and the seconds by cause of each run that knows them."""
    rows = []
    for run in runs:
        seconds = run.summary.get("time_by_cause")
        if seconds:
            ordered = {cause: seconds[cause] for cause in CAUSE_COLORS if cause in seconds}
            rows.append((run.name, ordered))
    return rows


def processor_noun(runs: Sequence[LoadedRun]) -> str:
    """Returns `GPUs`, or `ranks` if one of the runs had no GPUs."""
    return "GPUs" if all(run.has_gpus for run in runs) else "ranks"


def time_unit(longest_seconds: float) -> tuple[float, str]:
    """Returns the seconds and the name of the unit that suits the longest time."""
    return _choose_unit(_TIME_UNITS, longest_seconds)


def _choose_unit(
    units: Sequence[tuple[float, float, str]], largest_value: float
) -> tuple[float, str]:
    for minimum, divisor, name in units:
        if largest_value >= minimum:
            return divisor, name
    raise ValueError(f"no unit for {largest_value}")
