"""Hands the schedule's values of each step to the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import keras


class Hyperparameters(Protocol):
    """The optimizer's scalars."""

    def assign(self, values: Mapping[str, float]) -> None:
        """Sets the named scalars."""


class HyperparameterSchedule(keras.callbacks.Callback):
    """Sets learning rate, momentum, phase and the AdaBound bounds before every step.

    The schedule is a function of the fractional epochs at the start and the end of the step, which follow from the
    images processed; so it holds when the batch or the number of ranks changes.
    """

    def __init__(self, schedule: Callable[[float, float, int], Mapping[str, float]], hyper: Hyperparameters):
        """`schedule(start, end, global_batch)` gives the values; `hyper` takes them in one assignment."""
        super().__init__()
        self._schedule = schedule
        self._hyper = hyper
        self._global_batch = 0
        self.current: Mapping[str, float] = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the global batch of the epoch."""
        self._global_batch = (logs or {})["global_batch"]

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the values for the step that covers the fractional epochs logs["start"] to logs["end"]."""
        logs = logs or {}
        self.current = self._schedule(logs["start"], logs["end"], self._global_batch)
        self._hyper.assign(self.current)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the values to a step record."""
        if logs and "train_loss" in logs:
            logs.update(self.current)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the values of the last step to the epoch's record."""
        if logs is not None:
            logs.update(self.current)
