"""Ends training that has diverged on all ranks at the same step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hybrid_imagenet.callbacks.training_callback import StepCounter, TrainingCallback
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.errors import NumericsError

_PROGRAM_REMEDY = (
    "training has diverged; lower the learning rate (--lr, or --lars_eta) or lengthen the warmup,"
    " and start again"
)
_FIT_REMEDY = (
    "training has diverged; lower the learning rate or lengthen its warmup, and start again from a"
    " checkpoint of an earlier epoch, or from the beginning"
)

Alarm = tuple[int, float]
"""The first step with a bad loss, counted from 1, and its loss."""


class DivergedError(NumericsError):
    """Training has diverged; all ranks raise it at the same step.

    Attributes:
      step: the first one that had diverged.
      loss: its loss, which is too high or not finite.
    """

    def __init__(self, message: str, step: int, loss: float):
        super().__init__(message)
        self.step = step
        self.loss = loss


class DivergenceGuard(TrainingCallback):
    """Stops all ranks if the loss of one of them is not finite or too high.

    In `fit` it checks the mean loss of each epoch. In the program the device judges the loss of
    every step (`training.loss_alarm.LossAlarm`). The guard reads its verdict where values are
    fetched anyway, and before anything is validated or saved, so no step waits for it.

    If the loss has diverged, all ranks raise a `hi.UserError` with exit code 3.

    Example:
      callbacks = [*hi.callbacks.default_callbacks(), hi.callbacks.DivergenceGuard()]

    Args:
      read_alarm: function that returns this rank's verdict, whose steps are counted from the
        beginning of the session (default: None, check the mean loss of epochs).
      read_alarm_now: function that returns the verdict on all steps up to now, for which it may
        wait (default: None, as `read_alarm`).
      highest_loss: highest loss, in nats, that has not diverged (default: math.inf).
      lag: function that returns how many steps ago the verdict of `read_alarm` was reached
        (default: no steps).
      communicator: the connected ranks (default: None, those of this process).
    """

    def __init__(
        self,
        read_alarm: Callable[[], Alarm | None] | None = None,
        *,
        read_alarm_now: Callable[[], Alarm | None] | None = None,
        highest_loss: float = math.inf,
        lag: Callable[[], int] = lambda: 0,
        communicator: Communicator | None = None,
    ):
        super().__init__(communicator)
        self._read_alarm = read_alarm
        self._read_alarm_now = read_alarm_now or read_alarm
        self._highest_loss = highest_loss
        self._lag = lag
        self._counter = StepCounter()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._first_step = self.params.get("initial_step", 0)
        # The alarm counts from the beginning of the session.
        self._counter.start(0)
        self._checked_steps = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._counter.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._counter.end_batch(batch)
        if logs is not None:
            self.check()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.check()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.check()
        loss = (logs or {}).get("loss")
        if self._read_alarm is None and loss is not None:
            alarm = (self._counter.steps, float(loss)) if self._has_diverged(loss) else None
            # Each rank may have its own loss. If only one rank raised, the others would wait.
            self._raise_first(self.communicator.allgather_object(alarm))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.check()

    def before_save(self) -> None:
        """Checks all steps up to now, because the values for the logs may be two steps late."""
        if self._read_alarm_now is None or self._checked_steps == self._counter.steps:
            return
        self._checked_steps = self._counter.steps
        self._raise_first(self.communicator.allgather_object(self._read_alarm_now()))

    def check(self) -> None:
        """Checks the losses up to now, unless they were checked; every rank calls it.

        Raises:
          DivergedError: on all ranks.
        """
        if self._read_alarm is None or self._checked_steps == self._counter.steps:
            return
        self._checked_steps = self._counter.steps - self._lag()
        self._raise_first(self.communicator.allgather_object(self._read_alarm()))

    def _has_diverged(self, loss: float) -> bool:
        return not math.isfinite(loss) or loss > self._highest_loss

    def _raise_first(self, alarms: list[Alarm | None]) -> None:
        raised = [alarm for alarm in alarms if alarm is not None]
        if not raised:
            return
        step, loss = min(raised, key=lambda alarm: alarm[0])
        step += self._first_step
        reason = "not finite"
        if self._read_alarm is None:
            if math.isfinite(loss):
                reason = f"above highest_loss={self._highest_loss:.4g}"
            line = f"step {step}: the mean loss is {loss:.4g}, {reason}: {_FIT_REMEDY}"
        else:
            if math.isfinite(loss):
                reason = f"above 100 times that of guesses, {self._highest_loss:.4g}"
            line = f"step {step}: the loss is {loss:.4g}, {reason}: {_PROGRAM_REMEDY}"
        raise DivergedError(line, step, loss)
