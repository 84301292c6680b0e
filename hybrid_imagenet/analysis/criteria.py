"""Computes the criteria by which the papers compare distributed training.

Lu et al. (section 1) measure how much one GPU contributes to reaching an accuracy:

    convergence rate                         = 1 / epochs to the target
    actual training speed                    = rate * single-GPU speed * GPUs * scaling efficiency
    actual training time                     = 1 / actual training speed
    actual average single-GPU training speed = rate * single-GPU speed * scaling efficiency
    actual average single-GPU training time  = 1 / that = actual training time * GPUs

A speed here is in passes over the training set per second, so that times are in seconds.
Accuracies and efficiencies are fractions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class TargetReached:
    """When a run first reached a target.

    Attributes:
      epoch: Number of epochs done.
      seconds: Seconds since the start of the run; None if unknown.
    """

    epoch: float
    seconds: float | None


def first_reaching(
    records: Iterable[Mapping[str, Any]], metric: str, target: float
) -> TargetReached | None:
    """Returns when the metric first reached the target, or None.

    Args:
      records: Epoch records in order of time, with the keys `epoch`, `metric` and, if known,
        `seconds`. Records without the metric (no validation after that epoch) are skipped.
      metric: For example `val_top1`.
      target: A fraction.
    """
    for record in records:
        value = record.get(metric)
        if value is not None and value >= target:
            return TargetReached(record["epoch"], record.get("seconds"))
    return None


def scaling_efficiency(
    images_per_second: float, single_gpu_images_per_second: float, gpus: int
) -> float:
    """Returns actual speed / ideal speed, where the ideal is `gpus` times the speed of one GPU.

    Reference:
      Lu et al., section 3.2.2.
    """
    return images_per_second / (single_gpu_images_per_second * gpus)


def actual_training_speed(
    epochs_to_target: float,
    single_gpu_images_per_second: float,
    gpus: int,
    efficiency: float,
    images_per_epoch: int,
) -> float:
    """Returns convergence rate * single-GPU speed * GPUs * scaling efficiency.

    Args:
      epochs_to_target: Number of epochs until the target accuracy.
      single_gpu_images_per_second: Speed of one GPU alone.
      gpus: Number of GPUs.
      efficiency: Scaling efficiency, a fraction.
      images_per_epoch: Number of images in the training set.

    Returns:
      Trainings per second.

    Reference:
      Lu et al., section 1.
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
    """Returns the reciprocal of the actual training speed, in seconds.

    See `actual_training_speed` for the arguments.

    Reference:
      Lu et al., section 1.
    """
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
    """Returns 1 / (convergence rate * single-GPU speed * scaling efficiency), in GPU seconds.

    See `actual_training_speed` for the arguments.

    Reference:
      Lu et al., section 1.
    """
    return actual_training_seconds(
        epochs_to_target, single_gpu_images_per_second, 1, efficiency, images_per_epoch
    )


def waterfall(
    wall_seconds: float, ideal_seconds: float | None, losses: Mapping[str, float]
) -> dict[str, float]:
    """Divides the time of a run by cause.

    Args:
      wall_seconds: Duration of the run.
      ideal_seconds: Images / (GPUs * speed of one GPU alone), the duration without any loss. None
        if the speed of one GPU is unknown; then computation and other losses are one entry.
      losses: Measured seconds by cause, for example input, exposed communication, evaluation,
        checkpoints.

    Returns:
      Seconds by cause, whose sum is `wall_seconds`: `computation`, the losses in the same order,
      and `other`, the seconds that no measurement explains. `other` is negative if the run was
      faster than its ideal, for example after a slow measurement on one GPU.
    """
    remaining_seconds = wall_seconds - sum(losses.values())
    if ideal_seconds is None:
        return {"computation and other": remaining_seconds, **losses}
    other_seconds = remaining_seconds - ideal_seconds
    return {"computation": ideal_seconds, **losses, "other": other_seconds}
