"""Hands the schedule's values of each step to the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.optimizers.base import GroupedOptimizer

Schedule = Callable[[float, float, int], Mapping[str, float]]


class HyperparameterSchedule(keras.callbacks.Callback):
    """Sets learning rate, momentum, phase and the AdaBound bounds before every step.

    The schedule is a function of the fractional epochs at the start and the end of the step, which follow from the
    images processed; so it holds when the batch or the number of ranks changes.
    """

    def __init__(
        self,
        schedule: Schedule,
        optimizer: GroupedOptimizer,
        state: RunState,
        relative_step: Callable[[Mapping[str, float]], float | None] = lambda values: None,
    ):
        """Keeps the values in `state.hyper`, so that a run resumed between an epoch's last step and its end has them.

        Args:
          schedule: of (start, end, global_batch).
          optimizer: takes its values in one assignment; built.
          state: of the run.
          relative_step: LARS's relative step under such values, None where LARS does not run; goes into the records.
        """
        super().__init__()
        self._schedule = schedule
        self._optimizer = optimizer
        self._state = state
        self._relative_step = relative_step
        self._global_batch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch's global batch."""
        self._global_batch = (logs or {})["global_batch"]

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the values for the step that covers the fractional epochs logs["start"] to logs["end"]."""
        span = logs or {}
        self._state.hyper = dict(self._schedule(span["start"], span["end"], self._global_batch))
        self._optimizer.hyper.assign(self._state.hyper)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the values to a step record."""
        if logs and "train_loss" in logs:
            self._record(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the values of the last step to the epoch's record."""
        if logs is not None:
            self._record(logs)

    def _record(self, logs: dict[str, Any]) -> None:
        logs.update(self._state.hyper)
        step = self._relative_step(self._state.hyper)
        if step is not None:
            logs["relative_step"] = step
