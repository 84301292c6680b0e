"""Computes what the charts of a report show; `svg` draws them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.analysis import published
from hybrid_imagenet.numerics import relative_step
from hybrid_imagenet.runlog.summary import INPUT_WINDOW
from hybrid_imagenet.tools.report.load import Run
from hybrid_imagenet.tools.report.palette import COLORS
from hybrid_imagenet.tools.report.svg import Chart, Series

_FIRST_THIRD = 1 / 3  # of a run: the steep rise, which would flatten all that follows
_WIDE = 20.0  # losses further apart than this go on a logarithmic axis
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

    The axis of accuracy begins where the runs are after their first third, so that the end can be read; a run that
    diverged leaves the chart.

    Args:
      runs: one color and one shape of marks each.
      what: `top1`, `top5` or `loss`.
      by: `epoch` or `hours`.
    """
    longest = max((h for run in runs for h in run.series("seconds", by="hours")[0]), default=0.0)
    divisor, unit = unit_of_time(3600 * longest)
    alone = len(runs) == 1
    series = []
    for number, run in enumerate(runs):
        for part, word, dashed in (("val", "validation", False), ("train", "training", True)):
            xs, ys = run.series(f"{part}_{what}", by=by)
            ys = ys if what == "loss" else [100 * y for y in ys]
            name = word if alone else run.name if not dashed else f"{run.name}, training"
            along = xs if by == "epoch" else [3600 * x / divisor for x in xs]
            shown = int(dashed) if alone else number
            shape = None if alone or dashed else number
            series.append(Series(name, along, ys, shown, dashed=dashed, shape=shape, key=alone or not dashed))
    y_label = {"top1": "top-1 accuracy (%)", "top5": "top-5 accuracy (%)", "loss": "loss (nats)"}[what]
    title = {"top1": "Top-1 accuracy", "top5": "Top-5 accuracy", "loss": "Loss"}[what]
    title += " by time" if by == "hours" else " by epoch"
    x_label = f"{unit} since the start" if by == "hours" else "epoch"
    chart = _unless_empty(Chart(title, series, x_label, y_label))
    if chart is None:
        return None
    if what == "loss":
        losses = [y for run in _good(runs) for y in _losses(run)]
        apart = bool(losses) and max(losses) > _WIDE * min(losses) > 0
        return dataclasses.replace(chart, log_y=apart, limits=_around(losses, log=apart))
    levels = _targets(runs) if what == "top1" else []
    shown_values = [100 * y for run in _good(runs) for y in _after_the_rise(run, what)]
    limits = _around([*shown_values, *(value for _, value in levels)], highest=100.0)
    return dataclasses.replace(chart, levels=levels, limits=limits)


def _targets(runs: Sequence[Run]) -> list[tuple[str, float]]:
    asked = sorted({target for run in runs if run.target_asked or run.imagenet for target in run.targets})
    return [(f"target {100 * target:.4g} %", 100 * target) for target in asked]


def _good(runs: Sequence[Run]) -> list[Run]:
    """The runs that an axis is made for: those that have not diverged or failed, if there are any."""
    best = max((max(run.series("val_top1")[1], default=0.0) for run in runs), default=0.0)
    kept = [r for r in runs if not r.diverged and max(r.series("val_top1")[1], default=0.0) >= _HOPELESS * best]
    return kept or list(runs)


def _after_the_rise(run: Run, what: str) -> list[float]:
    values = []
    for part in ("val", "train"):
        xs, ys = run.series(f"{part}_{what}")
        values += [y for x, y in zip(xs, ys, strict=True) if x > _FIRST_THIRD * xs[-1]]
    return values


def _losses(run: Run) -> list[float]:
    return [y for part in ("val", "train") for y in run.series(f"{part}_loss")[1] if y > 0]


def _around(values: Sequence[float], *, highest: float = math.inf, log: bool = False) -> tuple[float, float] | None:
    """Ends of an axis that holds the values with a margin; None if there is no value."""
    if not values:
        return None
    low, high = min(values), max(values)
    if log:
        return low / 1.5, high * 1.5
    margin = max(0.08 * (high - low), 0.002 * abs(high)) or 1.0
    return max(low - margin, 0.0), max(min(high + margin, highest), high)


def learning_rate(run: Run) -> Chart | None:
    """Learning rate, with AdaBound's bounds as long as they hold."""
    steps = len(run.series("learning_rate", steps=True)[0]) > len(run.series("learning_rate")[0])
    bounded = dataclasses.replace(
        run, steps=[r for r in run.steps if r.get("phase") == 0], epochs=[r for r in run.epochs if r.get("phase") == 0]
    )
    series = [
        Series("upper bound Bu", *bounded.series("upper_bound", steps=steps), 1, dashed=True),
        Series("learning rate", *run.series("learning_rate", steps=steps), 0),
        Series("lower bound Bl", *bounded.series("lower_bound", steps=steps), 2, dashed=True),
    ]
    title = f"Learning rate and bounds, {run.name}"
    return _unless_empty(Chart(title, series, "epoch", "learning rate per update", log_y=True))


def relative_steps(runs: Sequence[Run]) -> Chart | None:
    """Relative step of LARS by epoch, beside tuned LARS at the batch of each epoch; None without LARS."""
    series = _by_run(runs, "relative_step")
    tuned: dict[float, list[tuple[float, float]]] = {}
    for run in runs:
        for record in run.epochs:
            if record.get("relative_step") is not None and record.get("global_batch"):
                step = relative_step.tuned(record["global_batch"])
                tuned.setdefault(record["global_batch"], []).append((float(record["epoch"]), step))
    for batch, points in sorted(tuned.items()):
        xs, ys = zip(*sorted(set(points)), strict=True)
        series.append(Series(f"tuned LARS, peak, batch {batch}", xs, ys, COLORS - 1, dashed=True))
    y_label = "relative to the weights' norm"
    return _unless_empty(Chart("Relative step of LARS", series, "epoch", y_label, log_y=True))


def _by_run(runs: Sequence[Run], key: str) -> list[Series]:
    several = len(runs) > 1
    return [Series(run.name, *run.series(key), n, shape=n if several else None) for n, run in enumerate(runs)]


def throughput(runs: Sequence[Run]) -> Chart | None:
    """Images per second by epoch."""
    series = _by_run(runs, "images_per_second")
    return _unless_empty(Chart("Training throughput", series, "epoch", "images per second", zero=True))


_SAME_WORK = ("model", "dataset", "image_size", "per_gpu_batch", "precision")


def comparable(runs: Sequence[Run]) -> list[Run]:
    """The largest group of runs that differ in the number of GPUs and not in the work of each; the first of equals."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if run.summary.get("steady_images_per_second"):
            groups.setdefault(tuple(str(run.flags.get(name)) for name in _SAME_WORK), []).append(run)
    return max(groups.values(), key=lambda group: len({run.summary["world_size"] for run in group}), default=[])


def scaling(runs: Sequence[Run]) -> list[Chart]:
    """Throughput and efficiency by GPUs (Lu et al., Figure 3.5), from comparable runs of several sizes; else nothing.

    Efficiency is relative to the speed per GPU of the smallest size.
    """
    speeds: dict[int, list[float]] = {}
    for run in comparable(runs):
        speeds.setdefault(int(run.summary["world_size"]), []).append(run.summary["steady_images_per_second"])
    if len(speeds) < 2:
        return []
    sizes = sorted(speeds)
    rates = [statistics.median(speeds[n]) for n in sizes]
    one = rates[0] / sizes[0]
    shares = [100 * rate / (one * n) for n, rate in zip(sizes, rates, strict=True)]
    ideal = Series("linear", sizes, [one * n for n in sizes], 1, dashed=True)
    measured = Series("measured", sizes, rates, 0, markers=True)
    efficiency = Series("measured", sizes, shares, 0, markers=True)
    word = processors(runs)
    first = f"{sizes[0]} {word if sizes[0] > 1 else word.removesuffix('s')}"
    by: dict[str, Any] = {"x_label": word, "log_x": True, "stops": sizes}
    return [
        Chart(f"Throughput by {word}", [measured, ideal], y_label="images per second", log_y=True, **by),
        Chart(
            f"Scaling efficiency (100 %: {first})", [efficiency], y_label=f"% of {first} times as many", zero=True, **by
        ),
    ]


def processors(runs: Sequence[Run]) -> str:
    """What the ranks of the runs are: `GPUs`, or `ranks` where one of the runs had none."""
    return "GPUs" if all(run.on_gpus for run in runs) else "ranks"


def input_output(runs: Sequence[Run]) -> list[Chart]:
    """Bandwidth and operations per second of the program's reads by epoch, on axes that begin at 0.

    Beside runs on ImageNet stand the averages of NCSA HAL, if the axis reaches that far. Those are over epochs 10 to
    60, and so is their line; they are of the file system, ours of what is asked of it.
    """
    charts = []
    for source, title, reference in (
        ("bytes_read", "Input bandwidth (application reads)", 1e9 * published.HAL_IO_GB_S),
        ("reads", "Input operations (application reads)", published.HAL_IOPS),
    ):
        rates = []
        for run in runs:
            rows = [r for r in run.epochs if r.get(source) is not None and r.get("train_seconds")]
            rates.append(([r["epoch"] for r in rows], [r[source] / r["train_seconds"] for r in rows]))
        largest = max((y for _, ys in rates for y in ys), default=0.0)
        divisor, unit = _unit_of_bandwidth(largest) if source == "bytes_read" else (1.0, "reads per second")
        series = [
            Series(run.name, xs, [y / divisor for y in ys], n, shape=n if len(runs) > 1 else None)
            for n, (run, (xs, ys)) in enumerate(zip(runs, rates, strict=True))
        ]
        longest = max((s.xs[-1] for s in series if s.xs), default=0)
        first, last = INPUT_WINDOW
        near = largest >= reference / _FAR and any(run.imagenet for run in runs)
        if longest > first and near:
            name = f"NCSA HAL's file system, 64 V100, mean of epochs {first} to {last}"
            ends = [first, min(last, longest)]
            series.append(Series(name, ends, [reference / divisor] * 2, COLORS - 1, dashed=True))
        if longest:
            charts.append(Chart(title, [s for s in series if s.xs], "epoch", unit, zero=True))
    return charts


_FAR = 5.0  # times what a run reads: a line so far above it would press it to the floor


def trust_ratios(run: Run) -> tuple[list[tuple[str, list[float | None]]], list[float]] | None:
    """LARS trust ratios: (layer, values) rows and the epochs of the columns; None if none were recorded."""
    rows = [r for r in [*run.epochs, *run.steps] if r.get("trust_ratios")]
    by_epoch: dict[float, dict[str, Any]] = {}
    for record in rows:
        by_epoch.setdefault(float(record["epoch"]), record["trust_ratios"])
    if not by_epoch:
        return None
    columns = sorted(by_epoch)
    layers = list(by_epoch[columns[-1]])
    ending = "/kernel" if all(layer.endswith("/kernel") for layer in layers) else ""
    return [(n.removesuffix(ending), [by_epoch[c].get(n) for c in columns]) for n in layers], columns


def run_time(runs: Sequence[Run]) -> list[tuple[str, dict[str, float]]]:
    """Seconds of each run by cause."""
    known = [(run.name, run.summary["time_by_cause"]) for run in runs if run.summary.get("time_by_cause")]
    return [(name, {cause: parts[cause] for cause in CAUSES if cause in parts}) for name, parts in known]


def step_time(runs: Sequence[Run]) -> list[tuple[str, dict[str, float]]]:
    """Milliseconds of an average step after the first epoch, by cause, as far as it was measured."""
    rows = []
    for run in runs:
        records = [r for r in run.steps if r.get("step_seconds") and r.get("epoch", 0) > 1]
        records = records or [r for r in run.steps if r.get("step_seconds")]
        if not records:
            continue
        total = statistics.fmean(r["step_seconds"] for r in records)
        waits = [
            r["data_wait_fraction"] * r["step_seconds"] for r in records if r.get("data_wait_fraction") is not None
        ]
        parts = {
            "input": statistics.fmean(waits) if waits else 0.0,
            "exposed communication": _mean([*records, *run.epochs], "communication_seconds"),
            "slowest rank": _mean([*records, *run.epochs], "slowest_rank_seconds"),
        }
        known = {name: 1e3 * seconds for name, seconds in parts.items() if seconds > 0}
        rows.append((run.name, {"computation and other": 1e3 * total - sum(known.values()), **known}))
    return rows


def _mean(records: Sequence[dict[str, Any]], key: str) -> float:
    values = [r[key] for r in records if r.get(key) is not None]
    return statistics.fmean(values) if values else 0.0


def unit_of_time(seconds: float) -> tuple[float, str]:
    """The seconds in the unit that suits the longest of several times, and its name."""
    return _chosen(_TIMES, seconds)


def _unit_of_bandwidth(bytes_per_second: float) -> tuple[float, str]:
    """The bytes per second in the unit that suits the largest of several rates, and its name."""
    return _chosen(_BYTES, bytes_per_second)


def _chosen(choices: tuple[tuple[float, float, str], ...], largest: float) -> tuple[float, str]:
    return next((divisor, name) for least, divisor, name in choices if largest >= least)


def _unless_empty(chart: Chart) -> Chart | None:
    series = [s for s in chart.series if s.xs]
    return dataclasses.replace(chart, series=series) if series else None
