"""Computes the values in each chart of a report; `svg` and `png` draw them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.analysis import published
from hybrid_imagenet.numerics import relative_step
from hybrid_imagenet.runlog import input_rates
from hybrid_imagenet.tools.report.load import Run
from hybrid_imagenet.tools.report.svg import Series


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart with lines: `key` names its PNG; the rest as in `svg.line_chart`."""

    key: str
    title: str
    series: Sequence[Series]
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    zero: bool = False
    stops: Sequence[float] | None = None


_UNITS = ((2.0, 1.0, "hours"), (2 / 60, 60.0, "minutes"), (0.0, 3600.0, "seconds"))  # from so many hours on


def curves(runs: Sequence[Run], what: str, by: str) -> Chart | None:
    """Validation (solid) and training (dashed) accuracy or loss; None if no run has recorded any.

    Args:
      runs: one color each.
      what: `top1`, `top5` or `loss`.
      by: `epoch` or `hours`.
    """
    longest = max((h for run in runs for h in run.series("seconds", by="hours")[0]), default=0.0)
    factor, unit = next((factor, unit) for least, factor, unit in _UNITS if longest >= least)
    series = []
    for color, run in enumerate(runs):
        for part, word, dashed in (("val", "validation", False), ("train", "training", True)):
            xs, ys = run.series(f"{part}_{what}", by=by)
            scaled = ys if what == "loss" else [100 * y for y in ys]
            alone = len(runs) == 1
            name = word if alone else run.name if not dashed else f"{run.name}, training"
            shown = int(dashed) if alone else color
            along = xs if by == "epoch" else [factor * x for x in xs]
            series.append(Series(name, along, scaled, shown, dashed=dashed, key=alone or not dashed))
    y_label = {"top1": "top-1 accuracy (%)", "top5": "top-5 accuracy (%)", "loss": "loss (nats)"}[what]
    title = {"top1": "Top-1 accuracy", "top5": "Top-5 accuracy", "loss": "Loss"}[what]
    title += " by time" if by == "hours" else " by epoch"
    x_label = f"{unit} since the start" if by == "hours" else "epoch"
    return _unless_empty(Chart(f"{what}_by_{'time' if by == 'hours' else by}", title, series, x_label, y_label))


def learning_rate(run: Run, number: int) -> Chart | None:
    """Learning rate, with AdaBound's bounds as long as they hold; `number` tells the charts of several runs apart."""
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
    return _unless_empty(Chart(f"learning_rate_{number}", title, series, "epoch", "learning rate", log_y=True))


def relative_steps(runs: Sequence[Run]) -> Chart | None:
    """Relative step of LARS by epoch, beside tuned LARS at the batch of each epoch; None without LARS."""
    series = [Series(run.name, *run.series("relative_step"), color) for color, run in enumerate(runs)]
    tuned: dict[float, list[tuple[float, float]]] = {}
    for run in runs:
        for record in run.epochs:
            if record.get("relative_step") is not None and record.get("global_batch"):
                step = relative_step.tuned(record["global_batch"])
                tuned.setdefault(record["global_batch"], []).append((float(record["epoch"]), step))
    for batch, points in sorted(tuned.items()):
        xs, ys = zip(*sorted(set(points)), strict=True)
        series.append(Series(f"tuned LARS, peak, batch {batch}", xs, ys, len(runs), dashed=True))
    return _unless_empty(
        Chart("relative_step", "Relative step of LARS", series, "epoch", "part of the weights' norm", log_y=True)
    )


def throughput(runs: Sequence[Run]) -> Chart | None:
    """Images per second by epoch."""
    series = [Series(run.name, *run.series("images_per_second"), color) for color, run in enumerate(runs)]
    return _unless_empty(
        Chart("throughput_by_epoch", "Training throughput", series, "epoch", "images per second", zero=True)
    )


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
    gpus = sorted(speeds)
    rates = [statistics.median(speeds[n]) for n in gpus]
    one = rates[0] / gpus[0]
    ideal = Series("linear", gpus, [one * n for n in gpus], 1, dashed=True)
    measured = Series("measured", gpus, rates, 0, markers=True)
    efficiency = Series(
        "measured", gpus, [100 * r / (one * n) for n, r in zip(gpus, rates, strict=True)], 0, markers=True
    )
    return [
        Chart(
            "throughput_by_gpus",
            "Throughput by GPUs",
            [measured, ideal],
            "GPUs",
            "images per second",
            True,
            True,
            stops=gpus,
        ),
        Chart(
            "efficiency_by_gpus",
            f"Scaling efficiency (100 %: {gpus[0]} GPU{'s' if gpus[0] > 1 else ''})",
            [efficiency],
            "GPUs",
            "%",
            True,
            zero=True,
            stops=gpus,
        ),
    ]


def input_output(runs: Sequence[Run]) -> list[Chart]:
    """Bandwidth and operations per second of the program's reads by epoch, beside the averages of NCSA HAL.

    Those are over epochs 10 to 60, and so is their line; they are of the file system, ours of what is asked of it.
    """
    charts = []
    for key, source, factor, label, title, reference in (
        ("io_bandwidth", "bytes_read", 1e-9, "GB/s", "Input bandwidth (application reads)", published.HAL_IO_GB_S),
        ("iops", "reads", 1.0, "reads per second", "Input operations (application reads)", published.HAL_IOPS),
    ):
        series = []
        for color, run in enumerate(runs):
            rows = [r for r in run.epochs if r.get(source) is not None and r.get("train_seconds")]
            ys = [factor * r[source] / r["train_seconds"] for r in rows]
            series.append(Series(run.name, [r["epoch"] for r in rows], ys, color))
        longest = max((s.xs[-1] for s in series if s.xs), default=0)
        first, last = input_rates.WINDOW
        if longest > first:
            name = f"NCSA HAL's file system, 64 V100, mean of epochs {first} to {last}"
            series.append(Series(name, [first, min(last, longest)], [reference] * 2, len(runs), dashed=True))
        if longest:
            charts.append(Chart(key, title, series, "epoch", label, log_y=True))
    return charts


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


CAUSES = {
    "computation": 0,
    "computation and other": 0,
    "input": 1,
    "exposed communication": 2,
    "slowest rank": 3,
    "evaluation": 4,
    "checkpoints": 5,
    "other": 7,
}
"""Causes of time and their colors."""


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


def _unless_empty(chart: Chart) -> Chart | None:
    series = [s for s in chart.series if s.xs]
    return dataclasses.replace(chart, series=series) if series else None
