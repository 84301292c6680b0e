"""Sets the values of a schedule before each step; `AdaBoundBounds` and `LARSSchedule` are parts."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hybrid_imagenet.callbacks.training_callback import StepSpan, TrainingCallback
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.library import compiled_model
from hybrid_imagenet.library.broadcast import set_hyperparameters
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer

_log = logging.getLogger(__name__)

Schedule = Callable[[float, float, int], Mapping[str, float]]


class StepSchedule(TrainingCallback, abc.ABC):
    """Sets the values of a schedule before the steps of one kind.

    A schedule is a function of the fractional epochs at the start and the end of a step and of the
    global batch. In the program the loop knows them. In `fit` they follow from the number of steps
    per epoch, or from the exact order (`hybrid_imagenet.order.keras_dataset`), whose first pass
    after a resume is shorter. With `steps_per_execution=k` the values change every k steps.

    Each step belongs to one of the three subclasses, so its schedule is evaluated once and setting
    the values is one assignment: `AdaBoundBounds` has the steps of a bounded warmup, `LARSSchedule`
    those in which LARS scales the layers, and `LearningRateSchedule` all others.
    """

    @abc.abstractmethod
    def sets(self, optimizer: DistributedOptimizer, start: float) -> bool:
        """Returns whether this callback sets the values of a step.

        Args:
          optimizer: has the schedule.
          start: fractional epochs that are done before the step.
        """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Not at each step, because the search visits all layers.
        self._optimizers = {
            name: optimizer
            for name, optimizer in compiled_model.optimizers(self.model).items()
            if getattr(optimizer, "schedule", None) is not None
        }
        for optimizer in self._optimizers.values():
            optimizer.schedule_is_applied = True
            optimizer.schedule_values = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        for optimizer in self._optimizers.values():
            # A learning rate that another callback sets after this line, before the first step, is
            # an error, see `_check_rate`.
            optimizer.schedule_values.setdefault("learning_rate", float(optimizer.learning_rate))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the values for the steps that come next.

        Raises:
          UserError: if another callback has set the learning rate since the last step.
        """
        for name, optimizer in self._optimizers.items():
            span = self._span(batch, optimizer.schedule)
            if not self.sets(optimizer, span.start):
                continue
            values = dict(optimizer.schedule(span.start, span.end, span.global_batch))
            # Once per epoch, because reading the rate of one of Keras's optimizers may wait for a
            # GPU.
            if batch == 0 and "learning_rate" in values:
                _check_rate(name, optimizer)
            set_hyperparameters(optimizer, values)
            optimizer.schedule_values = values

    def _span(self, batch: int, schedule: Schedule) -> StepSpan:
        """Returns the span of the next step, or of the next `steps_per_execution` steps of `fit`.

        In `fit` the global batch is the one for which the schedule was made.
        """
        if self.in_program:
            span: StepSpan = self.params["step_span"]()
            return span
        steps = self.params["steps"]
        position_after = self.params.get("position_after", lambda done: self._epoch + done / steps)
        end = min(batch + self.model.steps_per_execution, steps)
        return StepSpan(
            position_after(batch), position_after(end), getattr(schedule, "base_batch", 0)
        )


class LearningRateSchedule(StepSchedule):
    """Sets learning rate and momentum before each step from the optimizer's schedule.

    It is one of `default_callbacks()`. `AdaBoundBounds` and `LARSSchedule` set the values of their
    steps instead. In `fit` this one also checks the schedules of all steps, and adds the values of
    the last step to the logs.

    Args:
      communicator: the connected ranks (default: None, those of this process).
    """

    def sets(self, optimizer: DistributedOptimizer, start: float) -> bool:
        return not is_bounded_warmup(optimizer, start) and not scales_layers(optimizer)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the schedules of `fit`.

        Raises:
          UserError: if the number of steps per epoch is not known.
        """
        super().on_train_begin(logs)
        if self.in_program:
            return
        for name, optimizer in self._optimizers.items():
            self._check(name, optimizer.schedule)

    def _check(self, name: str, schedule: Schedule) -> None:
        if not self.params.get("steps"):
            raise UserError(
                "A schedule needs the length of an epoch, which is not known for these data. Pass"
                " steps_per_epoch to fit."
            )
        epochs = self.params.get("epochs", 0)
        values = schedule(epochs - 0.5, epochs, getattr(schedule, "base_batch", 0))
        if values.get("learning_rate") == 0:
            _log.warning(
                "%s: the schedule's learning rate is 0 before epoch %d, the last one, ends",
                name,
                epochs,
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the values of the last step that the optimizer uses to the logs of `fit`."""
        if logs is None or self.in_program:
            return
        for name, optimizer in self._optimizers.items():
            prefix = "" if len(self._optimizers) == 1 else f"{name}."
            values = optimizer.schedule_values
            logs.update({prefix + key: values[key] for key in _used_values(optimizer, values)})


def is_bounded_warmup(optimizer: DistributedOptimizer, start: float) -> bool:
    """Returns whether a step is in the bounded warmup of hybrid gradient computing."""
    return start < getattr(optimizer.schedule, "bounded_epochs", 0.0)


def scales_layers(optimizer: Any) -> bool:
    """Returns whether LARS gives each layer its own learning rate."""
    inner = getattr(optimizer, "inner", optimizer)
    return isinstance(inner, GroupedOptimizer) and inner.scales_layers


def _used_values(optimizer: Any, values: Mapping[str, float]) -> list[str]:
    """Returns the names of the values of a schedule that an optimizer uses."""
    inner = getattr(optimizer, "inner", optimizer)
    if isinstance(inner, GroupedOptimizer) and inner.num_phases > 1:
        return list(values)
    used_names = ["learning_rate"]
    if isinstance(inner, GroupedOptimizer):
        used_names.append("momentum")
    return [name for name in used_names if name in values]


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
