"""Sets the trust coefficient of LARS and Hybrid when `fit` begins, unless it was passed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hybrid_imagenet import private_api
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.errors import SharedError
from hybrid_imagenet.optimizers.layer_scaled import LayerScaledOptimizer
from hybrid_imagenet.schedules import mlperf

Schedule = Callable[[float, float, int], Mapping[str, float]]

# A schedule is evaluated this often per epoch to find its peak.
_POINTS_PER_EPOCH = 8


def set_trust_coefficient(optimizer: Any, epochs: int, communicator: Communicator) -> None:
    """Sets the trust coefficient that an optimizer lacks; every rank calls it, in a callback.

    At the peak of the learning rate, LARS then makes the tuned relative step for the global batch.
    If rank 0 has restored a coefficient, all ranks use that one. Otherwise rank 0 prints it.

    Args:
      optimizer: Optimizer of a model, wrapped or not. One without a trust coefficient stays as it
        is.
      epochs: The last epoch of `fit`.
      communicator: Connects the ranks.

    Raises:
      SharedError: If the batch size of a rank is not known, or the learning rate is 0 in all steps
        in which LARS acts.
    """
    inner = getattr(optimizer, "inner", optimizer)
    if not isinstance(inner, LayerScaledOptimizer) or not inner.scales_layers:
        return
    rate, momentum = _peak(inner, getattr(optimizer, "schedule", None), epochs)
    rows = communicator.allgather_object([inner.trust_coefficient, batch_size(), rate, momentum])
    if not inner.needs_trust_coefficient:
        return
    coefficient, _, rate, momentum = rows[0]
    if coefficient is None:
        batches = [row[1] for row in rows]
        if None in batches:
            reason = "fit sets it from the batch size, but these data do not have a known one."
            raise SharedError(inner.missing_trust_coefficient(reason, rate, momentum))
        if rate <= 0:
            reason = "The learning rate is 0 in all steps in which LARS acts."
            raise SharedError(inner.missing_trust_coefficient(reason, rate, momentum))
        batch = sum(batches) * (getattr(optimizer, "accumulation_steps", None) or 1)
        coefficient = inner.tuned_trust_coefficient(batch, rate, momentum)
        if communicator.rank == 0:
            _print_coefficient(inner, coefficient, batch, rate)
    inner.set_trust_coefficient(coefficient)


def _print_coefficient(
    optimizer: LayerScaledOptimizer, coefficient: float, batch: int, rate: float
) -> None:
    step = mlperf.tuned_step(batch)
    print(
        f"{optimizer.name}: trust_coefficient={coefficient:.4g} for a global"
        f" batch of {batch} and a learning rate of {rate:g}: LARS moves a layer by {step:.2g} of"
        " its norm in a step",
        file=sys.stderr,
        flush=True,
    )


def batch_size() -> int | None:
    """Returns the batch size of the running `fit` on this rank, or None if it is not known."""
    data = private_api.running_fit_data()
    size = getattr(data, "batch_size", None)
    if size is None:
        # Keras's adapters do not know the batch size of these two.
        size = getattr(getattr(data, "py_dataset", None), "batch_size", None)
    if size is None and hasattr(data, "get_tf_dataset") and not hasattr(data, "py_dataset"):
        size = private_api.dataset_batch_size(data.get_tf_dataset())
    return size if isinstance(size, int) else None


def _peak(
    optimizer: LayerScaledOptimizer, schedule: Schedule | None, epochs: int
) -> tuple[float, float]:
    """Returns the largest learning rate with which LARS acts, and the momentum of the same step.

    The learning rate is 0 if LARS acts in no step. Without a schedule both are the present values.
    """
    momentum = optimizer.hyperparameters["momentum"]
    if schedule is None:
        return optimizer.learning_rate, momentum
    peak = 0.0
    for epoch in _epochs_to_try(schedule, epochs):
        values = schedule(epoch, epoch, getattr(schedule, "base_batch", 0))
        rate = values.get("learning_rate", optimizer.learning_rate)
        is_sgd = values.get("phase", 1.0) > 0.5
        lars_acts = is_sgd and values.get("trust_ratio_exponent", 1.0) >= 1.0
        if lars_acts and rate > peak:
            peak = rate
            momentum = values.get("momentum", momentum)
    return peak, momentum


def _epochs_to_try(schedule: Schedule, epochs: int) -> list[float]:
    """Returns fractional epochs at which to look for the peak of a schedule.

    A `fit` may be the first part of a run. So they reach to the end of the schedule if it is known,
    and include the ends of warmup and ramp even if this `fit` ends earlier.
    """
    arguments: Mapping[str, Any] = getattr(schedule, "arguments", None) or {}
    last = math.ceil(max(epochs, arguments.get("epochs", 0.0)))
    points = {number / _POINTS_PER_EPOCH for number in range(last * _POINTS_PER_EPOCH)}
    warmup_end = arguments.get("warmup_epochs", 0.0)
    points |= {warmup_end, warmup_end + arguments.get("hybrid_ramp_epochs", 0.0)}
    return sorted(points)
