"""Sets the values of a schedule before each step; `AdaBoundBounds` and `LARSSchedule` are parts."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hybrid_imagenet.callbacks.broadcast import set_hyperparameters
from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.training_run import StepSpan

_log = logging.getLogger(__name__)

Schedule = Callable[[float, float, int], Mapping[str, float]]


class StepSchedule(TrainingCallback, abc.ABC):
    """Sets the values of a schedule before the steps of one kind.

    A schedule is a function of the fractional epochs at the start and the end of a step and of the
    global batch (`StepSpan`). With `steps_per_execution=k` of `fit`, the values change every k
    steps.

    Each step belongs to one of the three subclasses, so its schedule is evaluated once and setting
    the values is one assignment: `AdaBoundBounds` has the steps of a bounded warmup, `LARSSchedule`
    those in which LARS scales the layers, and `LearningRateSchedule` all others.
    """

    @abc.abstractmethod
    def applies_to(self, optimizer: Any, epoch: float) -> bool:
        """Returns whether this callback sets the values of a step.

        Args:
          optimizer: Has the schedule.
          epoch: Fractional epochs that are done before the step.
        """

    def values(self, schedule: Schedule, span: StepSpan) -> Mapping[str, float]:
        """Returns the values of a step by name, such as "learning_rate"."""
        return schedule(*span)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Not at each step, because the search visits all layers.
        self._optimizers = {
            name: optimizer
            for name, optimizer in self.run.optimizers.items()
            if getattr(optimizer, "schedule", None) is not None
        }
        for optimizer in self._optimizers.values():
            optimizer.schedule_is_applied = True
            optimizer.schedule_values = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        for optimizer in self._optimizers.values():
            # A learning rate that another callback sets after this line, before the first step, is
            # an error, see `_check_rate`.
            optimizer.schedule_values.setdefault("learning_rate", float(optimizer.learning_rate))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the values for the steps that come next.

        Raises:
          UserError: If another callback has set the learning rate since the last step.
        """
        span = self.run.span
        for name, optimizer in self._optimizers.items():
            if not self.applies_to(optimizer, span.start):
                continue
            schedule = optimizer.schedule
            batch_of_schedule = getattr(schedule, "base_batch", 0)
            global_batch = span.global_batch or batch_of_schedule
            values = dict(self.values(schedule, StepSpan(span.start, span.end, global_batch)))
            # Once per epoch, because reading the rate of one of Keras's optimizers may wait for a
            # GPU.
            if batch == 0 and "learning_rate" in values:
                _check_rate(name, optimizer)
            set_hyperparameters(optimizer, values)
            optimizer.schedule_values = values


class LearningRateSchedule(StepSchedule):
    """Sets learning rate and momentum before each step from the optimizer's schedule.

    It is one of `default_callbacks()`. `AdaBoundBounds` and `LARSSchedule` set the values of their
    steps instead. When training begins, this one also checks the schedules of all steps.
    """

    def applies_to(self, optimizer: Any, epoch: float) -> bool:
        return not is_bounded_warmup(optimizer, epoch) and not scales_layers(optimizer)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the schedules.

        Raises:
          UserError: In `fit`, if the number of steps per epoch is not known.
        """
        super().on_train_begin(logs)
        for name, optimizer in self._optimizers.items():
            self.run.check_positions()
            schedule = optimizer.schedule
            epochs = self.params.get("epochs", 0)
            values = schedule(epochs - 0.5, epochs, getattr(schedule, "base_batch", 0))
            if values.get("learning_rate") == 0:
                _log.warning(
                    "%s: the schedule's learning rate is 0 before epoch %d, the last one, ends",
                    name,
                    epochs,
                )


def is_bounded_warmup(optimizer: Any, epoch: float) -> bool:
    """Returns whether a step is in the bounded warmup of hybrid gradient computing.

    Args:
      optimizer: Has a schedule.
      epoch: Fractional epochs that are done before the step.
    """
    return epoch < getattr(optimizer.schedule, "bounded_epochs", 0.0)


def scales_layers(optimizer: Any) -> bool:
    """Returns whether LARS gives each layer its own learning rate."""
    inner = getattr(optimizer, "inner", optimizer)
    return isinstance(inner, GroupedOptimizer) and inner.scales_layers


def _check_rate(name: str, optimizer: Any) -> None:
    """Raises UserError if the learning rate is not the one that the schedule has set."""
    rate = float(optimizer.learning_rate)
    scheduled = optimizer.schedule_values.get("learning_rate", rate)
    if np.float32(rate) != np.float32(scheduled):
        raise UserError(
            f"The learning rate of {name} is {rate:g}, but the schedule has set {scheduled:g}."
            " Another callback sets it too, such as LearningRateScheduler or ReduceLROnPlateau. Use"
            " either that callback or schedule=..."
        )
