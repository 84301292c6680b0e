"""Summarizes what a run reached, how fast, and the papers' criteria: the content of
`summary.json`.
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

_IMAGENET_CLASSES = 1000

_NUMBERS = (
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
_COUNTS = ("images_per_epoch", "images_dropped", "bad_records", "val_dropped", "num_classes")


def _is_goal(value: Any) -> bool:
    """Returns whether a value is an entry of `targets`, as `target_criteria` makes it."""
    if not isinstance(value, dict) or not isinstance(value.get("metric"), str):
        return False
    numbers = {key: number for key, number in value.items() if key != "metric"}
    if value.get("target") is None or not all(
        n is None or NON_NEGATIVE.accepts(n) for n in numbers.values()
    ):
        return False
    # A target that was reached has a convergence rate, which follows from its epoch.
    return value.get("epochs") is None or value.get("convergence_rate") is not None


_KINDS: Mapping[str, FieldType] = {
    **dict.fromkeys(_NUMBERS, NUMBER),
    **dict.fromkeys(_COUNTS, COUNT),
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
    "targets": FieldType("a list of targets", json_fields.list_of(_is_goal), null=False),
    "time_by_cause": FieldType("numbers by cause", json_fields.object_of(json_fields.is_number)),
}
"""Kinds of the values of summary.json."""


def read_summary(directory: pathlib.Path) -> dict[str, Any]:
    """Reads the summary.json of a run; empty if there is none.

    Args:
      directory: of the run.

    Raises:
      UserError: if the file cannot be read, or a value is of a wrong kind.
    """
    path = directory / "summary.json"
    if not os.path.lexists(path):
        return {}
    values = files.read_json(path)
    json_fields.check_fields(values, _KINDS, str(path))
    if "targets" in values:
        values["targets"] = [{**dict.fromkeys(_CRITERIA), **goal} for goal in values["targets"]]
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
      records: the records of metrics.jsonl, in order.
      world_size: N, the number of ranks (GPUs).
      images_per_epoch: images in the training set.
      targets: top-1 fractions; `epochs_to_target` speaks of the first. Top-5 93 % is always added.
      single_gpu_images_per_second: the speed of one rank alone, from a 1-rank run or a calibration;
      None if unknown.
      wall_seconds: of the whole run; by default `seconds` of the last record.
      steps: of the whole run; by default `step` of the last record.
      workers: number of GPUs in the last session, virtual ones too, if that is known.
      facts: further entries that are stored as they are.

    Returns:
      JSON-ready values under the keys that docs/logs.md explains; what is not known is None.
    """
    records = list(records)
    epochs = [r for r in records if r.get("kind") == "epoch"]
    validated = [(r["val_top1"], r.get("epoch")) for r in epochs if r.get("val_top1") is not None]
    best_top1, best_epoch = max(validated, key=lambda pair: pair[0], default=(None, None))
    finished = _last(epochs, "epoch") or 0
    seconds = wall_seconds if wall_seconds is not None else _last(records, "seconds")
    steady = steady_throughput(epochs)
    sizes = set(map(_gpus, epochs)) - {None}
    if len(sizes | ({workers} if workers and sizes else set())) > 1:
        steady = single_gpu_images_per_second = (
            None  # a resume on another number of GPUs: no speed is that of N
        )
    causes = time_by_cause(epochs, seconds, single_gpu_images_per_second, world_size)
    if single_gpu_images_per_second is None and world_size == 1:
        single_gpu_images_per_second = steady
    efficiency = None
    if steady and single_gpu_images_per_second:
        efficiency = criteria.scaling_efficiency(steady, single_gpu_images_per_second, world_size)
    goals = [("val_top1", target) for target in targets] + [("val_top5", TOP5_TARGET)]
    hits = [
        target_criteria(epochs, *goal, world_size, steady, efficiency, images_per_epoch)
        for goal in goals
    ]
    values = {
        **{
            key: _last(epochs, key)
            for key in ("val_top1", "val_top5", "val_loss", "train_loss", "train_top1")
        },
        "val_split": _last(epochs, "val_split"),
        "best_val_top1": best_top1,
        "best_epoch": best_epoch,
        "epochs": finished,
        "lost_epochs": lost_epochs(epochs, finished),
        "steps": steps if steps is not None else _last(records, "step") or 0,
        "target": targets[0] if targets else None,
        "epochs_to_target": hits[0]["epochs"] if targets else None,
        "images_per_second": mean_throughput(epochs),
        "steady_images_per_second": steady,
        "wall_seconds": seconds,
        "world_size": world_size,
        "images_per_epoch": images_per_epoch,
        "skipped_steps": _last(records, "skipped_steps") or 0,
        "images_dropped": _sum(_whole_epochs(epochs), "train_dropped"),
        "bad_records": max(
            (r["bad_records"] for r in epochs if r.get("bad_records") is not None), default=None
        ),
        "val_dropped": _last(epochs, "val_dropped"),
        "single_gpu_images_per_second": single_gpu_images_per_second,
        "scaling_efficiency": efficiency,
        "targets": hits,
        "time_by_cause": causes,
    }
    return to_json_types({**facts, **values})


def lost_epochs(records: Iterable[Record], finished: float) -> list[int]:
    """Returns the epochs from 1 to `finished` that have no record."""
    known = {r.get("epoch") for r in records if r.get("kind") == "epoch"}
    return [epoch for epoch in range(1, int(finished) + 1) if epoch not in known]


def target_criteria(
    epochs: Sequence[Record],
    metric: str,
    target: float,
    gpus: int,
    images_per_second: float | None,
    efficiency: float | None,
    images_per_epoch: int,
) -> dict[str, Any]:
    """Computes Lu et al.'s criteria for one target; None where it was not reached or a speed is not
    known.

    Returns:
      `metric`, `target`; `epochs` and `seconds` to it, as measured, with validation and
      checkpoints; `convergence_rate` (1/epochs); `single_gpu_images_per_second`,
      `scaling_efficiency`; and from the training
      throughput alone, as Lu et al. compute them: `actual_training_speed` (trainings per second),
      `actual_training_seconds`, `actual_average_single_gpu_seconds`.
    """
    values: dict[str, Any] = {"metric": metric, "target": target, **dict.fromkeys(_CRITERIA)}
    hit = criteria.first_reaching(epochs, metric, target)
    if hit is None or not hit.epoch:  # epoch 0, of a damaged record, has no rate
        return values
    values |= {"epochs": hit.epoch, "seconds": hit.seconds, "convergence_rate": 1 / hit.epoch}
    if images_per_second:
        # Single-GPU speed times efficiency is the throughput per GPU, whether or not the two are
        # known apart.
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
    """Returns training images per second over all epochs: each epoch's rate weighted with its
    training seconds.
    """
    pairs = [
        (r["images_per_second"], r.get("train_seconds") or 1.0)
        for r in epochs
        if r.get("images_per_second")
    ]
    total = sum(seconds for _, seconds in pairs)
    return sum(rate * seconds for rate, seconds in pairs) / total if total else None


def steady_throughput(epochs: Sequence[Record]) -> float | None:
    """Returns the median training images per second of the epochs after the first, or of the first
    if it is alone.

    The first step of a session, which is compiled, does not count.
    """
    rates = [rate for rate in map(throughput_without_compilation, epochs) if rate]
    return statistics.median(rates[1:] or rates) if rates else None


def throughput_without_compilation(record: Record) -> float | None:
    """Returns the images per second of an epoch record without the step that was compiled; None if
    unknown.
    """
    rate, seconds = record.get("images_per_second"), record.get("train_seconds") or 0.0
    running = seconds - (record.get("train_start_seconds") or 0.0)
    return rate if not rate or running <= 0 else float(rate * seconds / running)


def last_throughput(epochs: Sequence[Record]) -> float | None:
    """Returns the steady images per second on the number of GPUs of the last epoch, if a run has
    had several.
    """
    last: list[Record] = []
    for record in reversed(epochs):
        if last and _gpus(record) != _gpus(last[0]):
            break
        last.insert(0, record)
    return steady_throughput(last)


def _gpus(record: Record) -> int | None:
    """Returns the number of GPUs, virtual ones too, on which an epoch was trained; None if its
    record does not tell.
    """
    batch, images = record.get("global_batch"), record.get("per_gpu_batch")
    return int(batch // (images * (record.get("accumulation") or 1))) if batch and images else None


def time_by_cause(
    epochs: Sequence[Record], wall_seconds: float | None, single_gpu_rate: float | None, gpus: int
) -> dict[str, float] | None:
    """Returns seconds of the run by cause, which add up to its wall time (see
    `criteria.waterfall`).

    A cause that no record has measured is left out, and its time is in `other`.
    """
    if wall_seconds is None or not epochs:
        return None
    trained = [r for r in epochs if r.get("train_seconds") and r.get("images_per_second")]
    images = sum(r["train_seconds"] * r["images_per_second"] for r in trained)
    steps = _steps(epochs)
    causes = {
        "input": [
            r["train_seconds"] * r["data_wait_fraction"]
            for r in trained
            if r.get("data_wait_fraction")
        ],
        "exposed communication": _per_step(epochs, steps, "communication_seconds"),
        "slowest rank": _per_step(epochs, steps, "slowest_rank_seconds"),
        "evaluation": [r["validation_seconds"] for r in epochs if r.get("validation_seconds")],
        "checkpoints": [r["checkpoint_seconds"] for r in epochs if r.get("checkpoint_seconds")],
    }
    losses = {name: float(sum(parts)) for name, parts in causes.items() if parts}
    ideal = images / (gpus * single_gpu_rate) if single_gpu_rate else None
    return criteria.waterfall(wall_seconds, ideal, losses)


def _steps(epochs: Sequence[Record]) -> list[int]:
    """Returns the steps of each epoch; 0 where the epoch before it has no record."""
    steps, before = [], {"epoch": 0, "step": 0}
    for record in epochs:
        follows = record.get("epoch", 0) <= before.get("epoch", 0) + 1
        steps.append(record.get("step", 0) - before.get("step", 0) if follows else 0)
        before = dict(record)
    return steps


def _whole_epochs(epochs: Sequence[Record]) -> list[Record]:
    """Returns the last record of each epoch: counts of examples are those since its beginning."""
    return list({math.ceil(record.get("epoch", 0)): record for record in epochs}.values())


def _per_step(epochs: Sequence[Record], steps: Sequence[int], key: str) -> list[float]:
    return [r[key] * count for r, count in zip(epochs, steps, strict=True) if r.get(key)]


def _sum(epochs: Sequence[Record], key: str) -> int | None:
    values = [r[key] for r in epochs if r.get(key) is not None]
    return sum(values) if values else None


def _last(records: Sequence[Record], key: str) -> Any:
    return next((r[key] for r in reversed(records) if r.get(key) is not None), None)


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Returns the summary in a few lines of text, for the end of a run."""
    split = "on the tuning images: " if summary.get("val_split") == "tuning" else ""
    best_epoch = format_epochs(summary["best_epoch"]) if summary["best_epoch"] else "-"
    top5 = (
        f", top-5 {_percent(summary['val_top5'])}"
        if (summary.get("num_classes") or _IMAGENET_CLASSES) > 5
        else ""
    )
    results = (
        f"{split}top-1 {_percent(summary['val_top1'])} (best {_percent(summary['best_val_top1'])}"
        f" in epoch {best_epoch}){top5} after {_epochs(summary)}"
    )
    mixed = summary["images_per_second"] and not summary["steady_images_per_second"]
    before = ", on another number before" if mixed else ""
    text = [
        (
            results
            if best_epoch != "-"
            else f"nothing validated after {pluralize(summary['steps'], 'step')}"
        ),
        (
            f"{_number(summary['images_per_second'])} images/s on"
            f" {pluralize(summary['world_size'], 'rank')}{before},"
            f" {format_duration(summary['wall_seconds'])} in training and validation"
        ),
    ]
    if summary.get("scaling_efficiency") and summary["world_size"] > 1:
        text.append(
            f"scaling efficiency {_percent(summary['scaling_efficiency'])} of"
            f" {summary['world_size']} x {_number(summary['single_gpu_images_per_second'])}"
            " images/s"
        )
    if summary.get("skipped_steps"):
        text.append(
            f"{pluralize(summary['skipped_steps'], 'step')} skipped for gradients that were not"
            " finite"
        )
    if summary.get("images_dropped") or summary.get("val_dropped"):
        text.append(
            f"{pluralize(summary['images_dropped'] or 0, 'training image')} dropped in all epochs"
            f" for {pluralize(summary['bad_records'] or 0, 'bad record')},"
            f" {pluralize(summary['val_dropped'] or 0, 'validation image')} in the last"
        )
    if summary.get("lost_epochs"):
        text.append(
            f"no records of {pluralize(len(summary['lost_epochs']), 'epoch')}: these results are of"
            " the others"
        )
    for goal in filter(lambda goal: _means_something(goal, summary), summary["targets"]):
        text += _goal_lines(goal, summary)
    return text


def _epochs(summary: Mapping[str, Any]) -> str:
    done, planned = summary["epochs"], summary.get("epochs_planned")
    of = f" of {format_epochs(planned)}" if planned and done < planned else ""
    return f"{format_epochs(done)}{of} epoch{'' if max(planned or 0, done) == 1 else 's'}"


def _means_something(goal: Mapping[str, Any], summary: Mapping[str, Any]) -> bool:
    """Whether a target was asked for, or is the papers' on their dataset."""
    imagenet = summary.get("num_classes") == _IMAGENET_CLASSES
    asked = summary.get("target_asked", True) and goal["metric"] == "val_top1"
    return bool(imagenet or asked)


def _goal_lines(goal: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    is_top1 = goal["metric"] == "val_top1"
    target = f"target {'' if is_top1 else 'top-5 '}{format_accuracy(goal['target'])}"
    if goal["epochs"] is None:
        best = summary["best_val_top1"] if is_top1 else None
        below = (
            f": the best is {100 * (goal['target'] - best):.2f} points below"
            if best is not None
            else ""
        )
        return [f"did not reach {target}{below}"]
    found = [
        f"reached {target} in epoch {format_epochs(goal['epochs'])}, after"
        f" {format_duration(goal['seconds'])}"
    ]
    if summary.get("num_classes") == _IMAGENET_CLASSES and summary.get("gpus"):
        found.append(
            f"  measures of Lu et al.: convergence rate {goal['convergence_rate']:.4f} (1 /"
            " epochs), average single-GPU training time"
            f" {format_duration(goal['actual_average_single_gpu_seconds'])}"
        )
    return found


def format_epochs(number: float) -> str:
    """Returns a number of epochs as it is shown everywhere: 90, 0.85, 12.5."""
    rounded = round(number, 2)
    return f"{rounded:.2f}".rstrip("0").rstrip(".") if rounded else f"{number:.1g}"


def format_accuracy(fraction: float) -> str:
    """Returns a fraction as 97 % or 75.9 %, with as many digits as it takes and no more than
    two.
    """
    return f"{100 * fraction:.2f}".rstrip("0").rstrip(".") + " %"


def format_duration(seconds: float | None) -> str:
    """Returns seconds as 45.1 s, 12 min 05 s or 3 h 07 min; a dash for None."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
