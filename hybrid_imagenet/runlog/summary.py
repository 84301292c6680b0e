"""Summarizes the results and the speed of a run: the content of `summary.json`.

It also computes the criteria of the papers.
"""

from __future__ import annotations

import math
import os
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybrid_imagenet import files
from hybrid_imagenet.analysis import criteria
from hybrid_imagenet.errors import pluralize
from hybrid_imagenet.runlog import json_fields
from hybrid_imagenet.runlog.json_fields import BOOLEAN, COUNT, NON_NEGATIVE, NUMBER, TEXT, FieldType
from hybrid_imagenet.runlog.jsonl import to_json_types

Record = Mapping[str, Any]

TOP5_TARGET = 0.93
"""Lu et al.'s second target."""
_IMAGENET_CLASSES = 1000
_MAX_CLASSES_WITHOUT_TOP5 = 5
# The keys of an entry of `targets`, except `metric` and `target`.
_CRITERIA = (
    "epochs",
    "seconds",
    "convergence_rate",
    "single_gpu_images_per_second",
    "scaling_efficiency",
    "actual_training_speed",
    "actual_training_seconds",
    "actual_average_single_gpu_seconds",
)

# The keys of summary.json whose values are numbers, and whole numbers.
_NUMBER_KEYS = (
    "val_top1",
    "val_top5",
    "val_loss",
    "train_loss",
    "train_top1",
    "best_val_top1",
    "best_epoch",
    "target",
    "epochs_to_target",
    "images_per_second",
    "steady_images_per_second",
    "wall_seconds",
    "single_gpu_images_per_second",
    "scaling_efficiency",
)
_COUNT_KEYS = ("images_per_epoch", "images_dropped", "bad_records", "val_dropped", "num_classes")


def _is_target_entry(value: Any) -> bool:
    """Returns whether a value is an entry of `targets`, as `target_criteria` returns it."""
    if not isinstance(value, dict) or not isinstance(value.get("metric"), str):
        return False
    if value.get("target") is None:
        return False
    for key, number in value.items():
        if key != "metric" and number is not None and not NON_NEGATIVE.accepts(number):
            return False
    # A target that was reached has a convergence rate, which follows from its epoch.
    return value.get("epochs") is None or value.get("convergence_rate") is not None


_FIELD_TYPES: Mapping[str, FieldType] = {
    **dict.fromkeys(_NUMBER_KEYS, NUMBER),
    **dict.fromkeys(_COUNT_KEYS, COUNT),
    "val_split": TEXT,
    "stop": TEXT,
    "run_dir": TEXT,
    "epochs": FieldType("a number from 0", NON_NEGATIVE.accepts, null=False),
    "epochs_planned": NON_NEGATIVE,
    "steps": FieldType("a whole number from 0", COUNT.accepts, null=False),
    "skipped_steps": COUNT,
    "world_size": FieldType(
        "a whole number above 0",
        lambda value: json_fields.is_count(value) and value > 0,
        null=False,
    ),
    "target_asked": BOOLEAN,
    "gpus": BOOLEAN,
    "lost_epochs": FieldType("a list of whole numbers", json_fields.list_of(json_fields.is_count)),
    "targets": FieldType("a list of targets", json_fields.list_of(_is_target_entry), null=False),
    "time_by_cause": FieldType("numbers by cause", json_fields.object_of(json_fields.is_number)),
}
"""The types of the values of summary.json."""


def read_summary(directory: pathlib.Path) -> dict[str, Any]:
    """Reads the summary.json of a run.

    Args:
      directory: Directory of the run.

    Returns:
      The values of the summary; empty if there is no summary.json.

    Raises:
      UserError: If the file cannot be read, or a value is of a wrong type.
    """
    path = directory / "summary.json"
    if not os.path.lexists(path):
        return {}
    values = files.read_json(path)
    json_fields.check_fields(values, _FIELD_TYPES, str(path))
    if "targets" in values:
        # An entry may lack some of the criteria.
        missing = dict.fromkeys(_CRITERIA)
        values["targets"] = [{**missing, **target} for target in values["targets"]]
    return values


def summarize(
    records: Iterable[Record],
    *,
    world_size: int,
    images_per_epoch: int,
    targets: Sequence[float] = (0.75, 0.759),
    single_gpu_images_per_second: float | None = None,
    wall_seconds: float | None = None,
    steps: int | None = None,
    workers: int | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Summarizes a run.

    Args:
      records: The records of metrics.jsonl, in order.
      world_size: N, the number of ranks (GPUs).
      images_per_epoch: Number of images in the training set.
      targets: Top-1 fractions; `epochs_to_target` is about the first one. Top-5 93 % is always
        added.
      single_gpu_images_per_second: Speed of one rank alone, from a run on 1 rank or a calibration;
        None if unknown.
      wall_seconds: Duration of the run; by default `seconds` of the last record.
      steps: Number of steps of the run; by default `step` of the last record.
      workers: Number of GPUs in the last session, including virtual ones; None if unknown.
      facts: Further entries that are stored unchanged.

    Returns:
      JSON-ready values under the keys that docs/records.md explains; unknown values are None.
    """
    records = list(records)
    epochs = [r for r in records if r.get("kind") == "epoch"]
    validated = [(r["val_top1"], r.get("epoch")) for r in epochs if r.get("val_top1") is not None]
    best_top1, best_epoch = max(validated, key=lambda pair: pair[0], default=(None, None))
    finished = _last(epochs, "epoch") or 0
    seconds = wall_seconds if wall_seconds is not None else _last(records, "seconds")
    steady = steady_throughput(epochs)
    if _number_of_gpus_changed(epochs, workers):
        # The run was resumed on a different number of GPUs, so no speed belongs to `world_size`
        # GPUs.
        steady = None
        single_gpu_images_per_second = None
    causes = time_by_cause(epochs, seconds, single_gpu_images_per_second, world_size)
    # Only after `time_by_cause`: the speed of a run on one rank does not show what that run lost.
    if single_gpu_images_per_second is None and world_size == 1:
        single_gpu_images_per_second = steady
    efficiency = None
    if steady and single_gpu_images_per_second:
        efficiency = criteria.scaling_efficiency(steady, single_gpu_images_per_second, world_size)
    metric_targets = [("val_top1", target) for target in targets] + [("val_top5", TOP5_TARGET)]
    target_entries = [
        target_criteria(epochs, metric, target, world_size, steady, efficiency, images_per_epoch)
        for metric, target in metric_targets
    ]
    values = {
        "val_top1": _last(epochs, "val_top1"),
        "val_top5": _last(epochs, "val_top5"),
        "val_loss": _last(epochs, "val_loss"),
        "train_loss": _last(epochs, "train_loss"),
        "train_top1": _last(epochs, "train_top1"),
        "val_split": _last(epochs, "val_split"),
        "best_val_top1": best_top1,
        "best_epoch": best_epoch,
        "epochs": finished,
        "lost_epochs": lost_epochs(epochs, finished),
        "steps": steps if steps is not None else _last(records, "step") or 0,
        "target": targets[0] if targets else None,
        "epochs_to_target": target_entries[0]["epochs"] if targets else None,
        "images_per_second": mean_throughput(epochs),
        "steady_images_per_second": steady,
        "wall_seconds": seconds,
        "world_size": world_size,
        "images_per_epoch": images_per_epoch,
        "skipped_steps": _last(records, "skipped_steps") or 0,
        "images_dropped": _sum(_last_record_by_epoch(epochs), "train_dropped"),
        "bad_records": max(
            (r["bad_records"] for r in epochs if r.get("bad_records") is not None), default=None
        ),
        "val_dropped": _last(epochs, "val_dropped"),
        "single_gpu_images_per_second": single_gpu_images_per_second,
        "scaling_efficiency": efficiency,
        "targets": target_entries,
        "time_by_cause": causes,
    }
    return to_json_types({**facts, **values})


def _number_of_gpus_changed(epochs: Sequence[Record], workers: int | None) -> bool:
    """Returns whether sessions had different numbers of GPUs, as far as records show it.

    Args:
      epochs: The epoch records.
      workers: Number of GPUs in the last session, which may have no record yet; None if unknown.
    """
    numbers = set(map(_gpus, epochs)) - {None}
    if numbers and workers:
        numbers.add(workers)
    return len(numbers) > 1


def lost_epochs(records: Iterable[Record], finished: float) -> list[int]:
    """Returns the epochs from 1 to `finished` that have no record."""
    recorded = {r.get("epoch") for r in records if r.get("kind") == "epoch"}
    return [epoch for epoch in range(1, int(finished) + 1) if epoch not in recorded]


def target_criteria(
    epochs: Sequence[Record],
    metric: str,
    target: float,
    gpus: int,
    images_per_second: float | None,
    efficiency: float | None,
    images_per_epoch: int,
) -> dict[str, Any]:
    """Computes the criteria of Lu et al. for one target.

    Args:
      epochs: The epoch records, in order.
      metric: Key of the records, such as `val_top1`.
      target: Fraction that the metric must reach.
      gpus: Number of GPUs.
      images_per_second: Steady throughput of all GPUs; None if unknown.
      efficiency: Scaling efficiency; None if unknown.
      images_per_epoch: Number of images in the training set.

    Returns:
      `metric` and `target`; `epochs` and `seconds` until the target, as measured, including
      validation and checkpoints; `convergence_rate` (1/epochs); `single_gpu_images_per_second` and
      `scaling_efficiency`. From the training throughput alone, as Lu et al. compute them:
      `actual_training_speed` (trainings per second), `actual_training_seconds` and
      `actual_average_single_gpu_seconds`. Values are None if the target was not reached or a speed
      is unknown.

    Reference:
      Lu et al., section 1.
    """
    values: dict[str, Any] = {"metric": metric, "target": target, **dict.fromkeys(_CRITERIA)}
    hit = criteria.first_reaching(epochs, metric, target)
    # Epoch 0, which only a damaged record has, would not have a rate.
    if hit is None or not hit.epoch:
        return values
    values |= {"epochs": hit.epoch, "seconds": hit.seconds, "convergence_rate": 1 / hit.epoch}
    if images_per_second:
        # The criteria only need the product of single-GPU speed and efficiency, which is the
        # throughput per GPU. So they are known even if the two factors are not.
        per_gpu = images_per_second / gpus
        arguments = (hit.epoch, per_gpu, gpus, 1.0, images_per_epoch)
        values["actual_training_speed"] = criteria.actual_training_speed(*arguments)
        values["actual_training_seconds"] = criteria.actual_training_seconds(*arguments)
        values["actual_average_single_gpu_seconds"] = criteria.actual_average_single_gpu_seconds(
            hit.epoch, per_gpu, 1.0, images_per_epoch
        )
    if efficiency and images_per_second:
        values["single_gpu_images_per_second"] = images_per_second / (gpus * efficiency)
        values["scaling_efficiency"] = efficiency
    return values


def mean_throughput(epochs: Sequence[Record]) -> float | None:
    """Returns the training images per second of a run, None if unknown.

    The rate of each epoch is weighted by its training seconds.
    """
    images = 0.0
    total_seconds = 0.0
    for record in epochs:
        rate = record.get("images_per_second")
        if rate:
            seconds = record.get("train_seconds") or 1.0
            images += rate * seconds
            total_seconds += seconds
    return images / total_seconds if total_seconds else None


def steady_throughput(epochs: Sequence[Record]) -> float | None:
    """Returns the median training images per second of the epochs after the first.

    If there is only one epoch, it returns the rate of that epoch. The first step of a session,
    which is compiled, does not count.
    """
    rates = [rate for rate in map(throughput_without_compilation, epochs) if rate]
    return statistics.median(rates[1:] or rates) if rates else None


def throughput_without_compilation(record: Record) -> float | None:
    """Returns the images per second of an epoch record, None if unknown.

    The time of the first step of a session, which is compiled, is subtracted.
    """
    rate = record.get("images_per_second")
    seconds = record.get("train_seconds") or 0.0
    seconds_without_compilation = seconds - (record.get("train_start_seconds") or 0.0)
    if not rate or seconds_without_compilation <= 0:
        return rate
    return float(rate * seconds / seconds_without_compilation)


def last_throughput(epochs: Sequence[Record]) -> float | None:
    """Returns the steady images per second of the last epochs that had the same number of GPUs."""
    last_epochs: list[Record] = []
    for record in reversed(epochs):
        if last_epochs and _gpus(record) != _gpus(last_epochs[0]):
            break
        last_epochs.insert(0, record)
    return steady_throughput(last_epochs)


def _gpus(record: Record) -> int | None:
    """Returns the number of GPUs of an epoch, including virtual ones; None if unknown."""
    global_batch = record.get("global_batch")
    per_gpu_batch = record.get("per_gpu_batch")
    if not global_batch or not per_gpu_batch:
        return None
    return int(global_batch // (per_gpu_batch * (record.get("accumulation") or 1)))


def time_by_cause(
    epochs: Sequence[Record], wall_seconds: float | None, single_gpu_rate: float | None, gpus: int
) -> dict[str, float] | None:
    """Divides the wall time of a run by cause (see `criteria.waterfall`).

    Args:
      epochs: The epoch records, in order.
      wall_seconds: Duration of the run; None if unknown.
      single_gpu_rate: Images per second of one GPU alone; None if unknown.
      gpus: Number of GPUs.

    Returns:
      Seconds by cause, whose sum is `wall_seconds`; None without epochs or a duration. The time of
      a cause that was not measured is in `other`.
    """
    if wall_seconds is None or not epochs:
        return None
    trained = [r for r in epochs if r.get("train_seconds") and r.get("images_per_second")]
    images = sum(r["train_seconds"] * r["images_per_second"] for r in trained)
    steps = _steps(epochs)
    seconds_by_cause = {
        "input": [
            r["train_seconds"] * r["data_wait_fraction"]
            for r in trained
            if r.get("data_wait_fraction")
        ],
        "exposed communication": _times_steps(epochs, steps, "communication_seconds"),
        "slowest rank": _times_steps(epochs, steps, "slowest_rank_seconds"),
        "evaluation": [r["validation_seconds"] for r in epochs if r.get("validation_seconds")],
        "checkpoints": [r["checkpoint_seconds"] for r in epochs if r.get("checkpoint_seconds")],
    }
    losses = {cause: float(sum(seconds)) for cause, seconds in seconds_by_cause.items() if seconds}
    ideal_seconds = images / (gpus * single_gpu_rate) if single_gpu_rate else None
    return criteria.waterfall(wall_seconds, ideal_seconds, losses)


def _steps(epochs: Sequence[Record]) -> list[int]:
    """Returns the number of steps of each epoch, or 0 if the previous epoch has no record."""
    steps = []
    previous_epoch = 0
    previous_step = 0
    for record in epochs:
        epoch = record.get("epoch", 0)
        step = record.get("step", 0)
        follows_previous = epoch <= previous_epoch + 1
        steps.append(step - previous_step if follows_previous else 0)
        previous_epoch = epoch
        previous_step = step
    return steps


def _last_record_by_epoch(epochs: Sequence[Record]) -> list[Record]:
    """Returns the last record of each epoch.

    An epoch that was interrupted has several. Each counts examples since the epoch began.
    """
    return list({math.ceil(record.get("epoch", 0)): record for record in epochs}.values())


def _times_steps(epochs: Sequence[Record], steps: Sequence[int], key: str) -> list[float]:
    """Multiplies a value per step by the number of steps of each epoch."""
    return [r[key] * count for r, count in zip(epochs, steps, strict=True) if r.get(key)]


def _sum(epochs: Sequence[Record], key: str) -> int | None:
    values = [r[key] for r in epochs if r.get(key) is not None]
    return sum(values) if values else None


def _last(records: Sequence[Record], key: str) -> Any:
    return next((r[key] for r in reversed(records) if r.get(key) is not None), None)


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Returns the summary as a few lines of text, for the end of a run."""
    lines = [_results_line(summary), _speed_line(summary)]
    if summary.get("scaling_efficiency") and summary["world_size"] > 1:
        lines.append(
            f"scaling efficiency {format_percent(summary['scaling_efficiency'])} of"
            f" {summary['world_size']} x {_format_rate(summary['single_gpu_images_per_second'])}"
            " images/s"
        )
    if summary.get("skipped_steps"):
        lines.append(
            f"{pluralize(summary['skipped_steps'], 'step')} skipped for gradients that were not"
            " finite"
        )
    if summary.get("images_dropped") or summary.get("val_dropped"):
        lines.append(
            f"{pluralize(summary['images_dropped'] or 0, 'training image')} dropped in all epochs"
            f" for {pluralize(summary['bad_records'] or 0, 'bad record')},"
            f" {pluralize(summary['val_dropped'] or 0, 'validation image')} in the last"
        )
    if summary.get("lost_epochs"):
        lines.append(
            f"no records of {pluralize(len(summary['lost_epochs']), 'epoch')}: these results are of"
            " the others"
        )
    for target in summary["targets"]:
        if _is_relevant_target(target, summary):
            lines += _target_lines(target, summary)
    return lines


def _results_line(summary: Mapping[str, Any]) -> str:
    if not summary["best_epoch"]:
        return f"nothing validated after {pluralize(summary['steps'], 'step')}"
    split = "on the tuning images: " if summary.get("val_split") == "tuning" else ""
    best = (
        f"best {format_percent(summary['best_val_top1'])} in epoch"
        f" {format_epochs(summary['best_epoch'])}"
    )
    top5 = ""
    if is_top5_meaningful(summary.get("num_classes")):
        top5 = f", top-5 {format_percent(summary['val_top5'])}"
    return (
        f"{split}top-1 {format_percent(summary['val_top1'])} ({best}){top5} after"
        f" {_epochs_text(summary)}"
    )


def is_top5_meaningful(num_classes: int | None) -> bool:
    """Returns whether a run has enough classes for top-5 accuracy; with five it is always 100 %.

    If the number of classes is unknown, it is assumed to be the one of ImageNet.
    """
    return int(num_classes or _IMAGENET_CLASSES) > _MAX_CLASSES_WITHOUT_TOP5


def _speed_line(summary: Mapping[str, Any]) -> str:
    rate = summary["images_per_second"]
    number_of_ranks_changed = rate and not summary["steady_images_per_second"]
    before = " (before on a different number of ranks)" if number_of_ranks_changed else ""
    return (
        f"{_format_rate(rate)} images/s on {pluralize(summary['world_size'], 'rank')}{before},"
        f" {format_duration(summary['wall_seconds'])} in training and validation"
    )


def _epochs_text(summary: Mapping[str, Any]) -> str:
    done = summary["epochs"]
    planned = summary.get("epochs_planned")
    of_planned = f" of {format_epochs(planned)}" if planned and done < planned else ""
    plural = "" if max(planned or 0, done) == 1 else "s"
    return f"{format_epochs(done)}{of_planned} epoch{plural}"


def _is_relevant_target(target: Mapping[str, Any], summary: Mapping[str, Any]) -> bool:
    """Returns whether a target was set by the user, or is one of the papers on their dataset."""
    if summary.get("num_classes") == _IMAGENET_CLASSES:
        return True
    return bool(summary.get("target_asked", True)) and target["metric"] == "val_top1"


def _target_lines(target: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    is_top1 = target["metric"] == "val_top1"
    name = f"target {'' if is_top1 else 'top-5 '}{format_accuracy(target['target'])}"
    if target["epochs"] is None:
        best = summary["best_val_top1"] if is_top1 else None
        if best is None:
            return [f"did not reach {name}"]
        return [
            f"did not reach {name}: the best is {100 * (target['target'] - best):.2f} points below"
        ]
    lines = [
        f"reached {name} in epoch {format_epochs(target['epochs'])}, after"
        f" {format_duration(target['seconds'])}"
    ]
    if summary.get("num_classes") == _IMAGENET_CLASSES and summary.get("gpus"):
        lines.append(
            f"  measures of Lu et al.: convergence rate {target['convergence_rate']:.4f} (1 /"
            " epochs), average single-GPU training time"
            f" {format_duration(target['actual_average_single_gpu_seconds'])}"
        )
    return lines


def format_epochs(number: float) -> str:
    """Formats a number of epochs: 90, 0.85, 12.5."""
    rounded = round(number, 2)
    return f"{rounded:.2f}".rstrip("0").rstrip(".") if rounded else f"{number:.1g}"


def format_accuracy(fraction: float) -> str:
    """Formats a fraction in percent with at most two digits after the point: 97 %, 75.9 %."""
    return f"{100 * fraction:.2f}".rstrip("0").rstrip(".") + " %"


def format_duration(seconds: float | None) -> str:
    """Formats seconds as 45.1 s, 12 min 05 s or 3 h 07 min; None is a dash."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_percent(fraction: float | None) -> str:
    """Formats a fraction in percent with two digits after the point: 97.00 %; None is a dash."""
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


def _format_rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
