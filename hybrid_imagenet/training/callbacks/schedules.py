"""Hands the schedule's values of each step to the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers.base import GroupedOptimizer

Schedule = Callable[[float, float, int], Mapping[str, float]]


class HyperparameterSchedule(keras.callbacks.Callback):
    """Sets learning rate, momentum, phase and the AdaBound bounds before every step.

    The schedule is a function of the fractional epochs at the start and the end of the step, which follow from the
    images processed; so it holds when the batch or the number of ranks changes.

    In `model.fit` it finds the optimizer and its schedule in the model, and the fractional epochs follow from the
    number of steps per epoch. With `steps_per_execution=k` the values change every k steps. An optimizer of Keras
    takes the learning rate only.
    """

    def __init__(
        self,
        schedule: Schedule | None = None,
        optimizer: GroupedOptimizer | None = None,
        state: RunState | None = None,
        relative_step: Callable[[Mapping[str, float]], float | None] = lambda values: None,
        *,
        global_batch: int | None = None,
    ):
        """Keeps the values in `state.hyper`, so that a run resumed between an epoch's last step and its end has them.

        Args:
          schedule: of (start, end, global_batch); by default that of the model's optimizer, if it has one.
          optimizer: takes its values in one assignment; built. By default that of the model.
          state: of the run.
          relative_step: LARS's relative step under such values, None where LARS does not run; goes into the records.
          global_batch: images of all ranks per update in `model.fit`, for schedules that depend on it; by default the
            batch that the schedule was made for.
        """
        super().__init__()
        self._schedule = schedule
        self._optimizer = optimizer
        self._state = state or RunState()
        self._relative_step = relative_step
        self._given_batch = global_batch
        self._global_batch = 0
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds schedule and optimizer in `model.fit`.

        Raises:
          UserError: if the number of steps per epoch is not known.
        """
        if self.model is None or self._in_use() is None:
            return
        if not (self.params or {}).get("steps"):
            raise UserError("a schedule needs to know how long an epoch is: give fit steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        known = getattr(self._in_use(), "base_batch", 0)
        self._global_batch = (logs or {}).get("global_batch") or self._given_batch or known

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the values for the step that covers the fractional epochs logs["start"] to logs["end"]."""
        schedule = self._in_use()
        if schedule is None:
            return
        span = logs if logs else self._span(batch)
        self._state.hyper = dict(schedule(span["start"], span["end"], self._global_batch))
        optimizer = self._optimizer or self._inner()
        if not hasattr(optimizer, "hyper"):
            optimizer.learning_rate = self._state.hyper["learning_rate"]
            return
        optimizer.hyper.assign(self._state.hyper)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if logs and "train_loss" in logs:
            self._record(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            self._record(logs)

    def _in_use(self) -> Schedule | None:
        if self._schedule is not None or self.model is None:
            return self._schedule
        found: Schedule | None = getattr(getattr(self.model, "optimizer", None), "schedule", None)
        return found

    def _inner(self) -> Any:
        """Returns the optimizer that updates the weights of the model."""
        optimizer = getattr(self.model, "optimizer", None)
        return getattr(optimizer, "inner", optimizer)

    def _span(self, batch: int) -> dict[str, float]:
        """Returns the fractional epochs before and after the steps that `fit` is about to make."""
        steps = self.params["steps"]
        end = min(batch + self.model.steps_per_execution, steps)
        return {"start": self._epoch + batch / steps, "end": self._epoch + end / steps}

    def _shown(self) -> dict[str, float]:
        """Returns the values that go into the records: in `model.fit` only those that the optimizer uses."""
        values = self._state.hyper
        if self._optimizer is not None or self.model is None:
            return values
        inner = self._inner()
        if getattr(inner, "phases", 1) > 1:
            return values
        used = ("learning_rate", "momentum") if hasattr(inner, "hyper") else ("learning_rate",)
        return {name: values[name] for name in used if name in values}

    def _record(self, logs: dict[str, Any]) -> None:
        logs.update(self._shown())
        step = self._relative_step(self._state.hyper)
        if step is not None:
            logs["relative_step"] = step
