"""Ends training that has diverged on all ranks at the same step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.errors import NumericsError

_REMEDY = (
    "Lower the learning rate or lengthen its warmup, and start again from a checkpoint of an"
    " earlier epoch, or from the beginning."
)

Alarm = tuple[int, float]
"""The first step with a bad loss, counted from 1, and its loss."""


class DivergedError(NumericsError):
    """Training has diverged; all ranks raise it at the same step.

    Attributes:
      step: The first one that had diverged.
      loss: Its loss, which is too high or not finite.
    """

    def __init__(self, message: str, step: int, loss: float):
        super().__init__(message)
        self.step = step
        self.loss = loss


class DivergenceGuard(TrainingCallback):
    """Stops all ranks if the mean loss of an epoch of `fit` is not finite or too high.

    All ranks raise a `hi.UserError` with exit code 3. The program checks the loss of every step,
    see `training.loss_alarm_guard.LossAlarmGuard`.

    Example:
      callbacks = [*hi.callbacks.default_callbacks(), hi.callbacks.DivergenceGuard()]

    Args:
      highest_loss: Highest loss, in nats, that has not diverged (default: math.inf).
    """

    def __init__(self, *, highest_loss: float = math.inf):
        super().__init__()
        self._highest_loss = highest_loss

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares the loss of each rank with the highest one; every rank calls it.

        Raises:
          DivergedError: On all ranks, if a rank has diverged.
        """
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        alarm = (self.run.state.step, float(loss)) if self._has_diverged(loss) else None
        # Each rank may have its own loss. If only one rank raised, the others would wait.
        first = first_alarm(self.communicator.allgather_object(alarm))
        if first is None:
            return
        step, loss = first
        reason = ""
        if math.isfinite(loss):
            reason = f", which is above highest_loss={self._highest_loss:.4g}"
        line = f"Training diverged at step {step}: the mean loss is {loss:.4g}{reason}. {_REMEDY}"
        raise DivergedError(line, step, loss)

    def _has_diverged(self, loss: float) -> bool:
        return not math.isfinite(loss) or loss > self._highest_loss


def first_alarm(alarms: Iterable[Alarm | None]) -> Alarm | None:
    """Returns the alarm with the first step among the alarms of all ranks."""
    raised = [alarm for alarm in alarms if alarm is not None]
    return min(raised, key=lambda alarm: alarm[0]) if raised else None
