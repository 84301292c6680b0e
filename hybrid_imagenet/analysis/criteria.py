"""Computes the criteria by which the papers compare distributed training.

Lu et al. (§1) measure a method by what one GPU contributes to reaching an accuracy:

    convergence rate                         = 1 / epochs to the target
    actual training speed                    = rate * single-GPU speed * GPUs * scaling efficiency
    actual training time                     = 1 / actual training speed
    actual average single-GPU training speed = rate * single-GPU speed * scaling efficiency
    actual average single-GPU training time  = 1 / that = actual training time * GPUs

A speed here is in passes over the training set per second, so that the times come out in seconds.
Accuracies and efficiencies are fractions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class TargetReached:
    """The moment a run first reached a target: epochs finished, and seconds since its start."""

    epoch: float
    seconds: float | None


def first_reaching(
    records: Iterable[Mapping[str, Any]], metric: str, target: float
) -> TargetReached | None:
    """The first record whose `metric` is at least `target`, or None.

    Args:
      records: in order of time, with the keys `epoch`, `metric` and, where known, `seconds`.
        Records without the metric (no validation after that epoch) are passed over.
      metric: for example `val_top1`.
      target: a fraction.
    """
    for record in records:
        value = record.get(metric)
        if value is not None and value >= target:
            return TargetReached(record["epoch"], record.get("seconds"))
    return None


def scaling_efficiency(
    images_per_second: float, single_gpu_images_per_second: float, gpus: int
) -> float:
    """Lu et al., section 3.2.2: actual speed / ideal speed, the ideal being `gpus` times the speed
    of one GPU alone.
    """
    return images_per_second / (single_gpu_images_per_second * gpus)


def actual_training_speed(
    epochs_to_target: float,
    single_gpu_images_per_second: float,
    gpus: int,
    efficiency: float,
    images_per_epoch: int,
) -> float:
    """Lu et al. §1: convergence rate * single-GPU speed * GPUs * scaling efficiency, in trainings
    per second.
    """
    single_gpu_speed = single_gpu_images_per_second / images_per_epoch
    return 1 / epochs_to_target * single_gpu_speed * gpus * efficiency


def actual_training_seconds(
    epochs_to_target: float,
    single_gpu_images_per_second: float,
    gpus: int,
    efficiency: float,
    images_per_epoch: int,
) -> float:
    """Lu et al. §1: the reciprocal of the actual training speed, in seconds."""
    speed = actual_training_speed(
        epochs_to_target, single_gpu_images_per_second, gpus, efficiency, images_per_epoch
    )
    return 1 / speed


def actual_average_single_gpu_seconds(
    epochs_to_target: float,
    single_gpu_images_per_second: float,
    efficiency: float,
    images_per_epoch: int,
) -> float:
    """Lu et al. §1: 1 / (convergence rate * single-GPU speed * scaling efficiency), in GPU
    seconds.
    """
    return actual_training_seconds(
        epochs_to_target, single_gpu_images_per_second, 1, efficiency, images_per_epoch
    )


def waterfall(
    wall_seconds: float, ideal_seconds: float | None, losses: Mapping[str, float]
) -> dict[str, float]:
    """Divides the time of a run by cause; the parts add up to `wall_seconds`.

    Args:
      wall_seconds: the whole run.
      ideal_seconds: images / (GPUs * speed of one GPU alone): what it would take if nothing were
        lost. None where the speed of one GPU is not known; then computation and what cannot be told
        from it are one part.
      losses: measured seconds by cause, for example input, exposed communication, evaluation,
        checkpoints.

    Returns:
      `computation`, then the losses in the order given, then `other`: what no measurement accounts
      for. It is negative where the run did better than its ideal, for example after a slow 1-GPU
      measurement.
    """
    rest = wall_seconds - sum(losses.values())
    if ideal_seconds is None:
        return {"computation and other": rest, **losses}
    return {"computation": ideal_seconds, **losses, "other": rest - ideal_seconds}
