"""Ends a run of the program that has diverged, on all ranks at the same step."""

from __future__ import annotations

import math
from typing import Any

from hybrid_imagenet.callbacks.divergence_guard import Alarm, DivergedError, first_alarm
from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.training.step import TrainStep

_REMEDY = "Lower the learning rate (--lr, or --lars_eta) or lengthen the warmup, and start again."


class LossAlarmGuard(TrainingCallback):
    """Stops all ranks if the loss of a step of one of them is not finite or too high.

    The device checks the loss of every step (`LossAlarm`). The guard reads the result where values
    are fetched anyway, and before anything is validated or saved, so no step waits for it.
    """

    def __init__(self, step: TrainStep):
        """Takes the step whose `alarm` and `telemetry` are read."""
        super().__init__()
        self._step = step

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to count at the first step of the session."""
        # The alarm counts from the beginning of the session.
        self._first_step = self.run.state.step
        self._checked_step = self._first_step

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks where values were fetched for the log."""
        if logs is not None:
            self.check()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks before the network is validated."""
        self.check()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks before the epoch is recorded."""
        self.check()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the last steps."""
        self.check()

    def check(self) -> None:
        """Checks the losses up to now, unless they were checked; every rank calls it.

        Inside an event with logs these may be the losses up to two steps ago.

        Raises:
          DivergedError: On all ranks.
        """
        step = self.run.state.step
        if self._checked_step == step:
            return
        self._checked_step = step - self._step.telemetry.age_steps
        self._raise_first(self._step.alarm.read(self.run.read("alarm")))

    def before_save(self) -> None:
        """Checks all steps up to now, because `check` may be two steps late."""
        step = self.run.state.step
        if self._checked_step == step:
            return
        self._checked_step = step
        self._raise_first(self._step.alarm.read())

    def _raise_first(self, own_alarm: Alarm | None) -> None:
        """Raises the alarm of the first step of any rank; every rank calls it."""
        first = first_alarm(self.communicator.allgather_object(own_alarm))
        if first is None:
            return
        step, loss = first
        step += self._first_step
        reason = ""
        if math.isfinite(loss):
            threshold = self._step.alarm.threshold
            reason = f", which is above 100 times that of guesses ({threshold:.4g})"
        line = f"Training diverged at step {step}: the loss is {loss:.4g}{reason}. {_REMEDY}"
        raise DivergedError(line, step, loss)
