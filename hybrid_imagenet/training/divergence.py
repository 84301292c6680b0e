"""Ends training that has diverged, on all ranks at the same step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.errors import NumericsError

_REMEDY = "training has diverged; lower --lr or lengthen --warmup_epochs, and start again"


class DivergedError(NumericsError):
    """Training has diverged; all ranks raise it at the same step.

    Attributes:
      loss: the loss over all ranks that is too high or not finite.
    """

    def __init__(self, message: str, loss: float):
        """Keeps the loss for the record."""
        super().__init__(message)
        self.loss = loss


class DivergenceGuard:
    """Reads the loss alarm of every rank.

    The trainer has it look wherever metrics are fetched, before validation, at the end of each epoch and of training,
    and before what is saved.
    """

    def __init__(
        self,
        state: RunState,
        alarm: Callable[[], tuple[int, float] | None],
        allgather: Callable[[Any], list[Any]],
        highest: float,
        behind: Callable[[], int] = lambda: 0,
    ):
        """Takes what to look at.

        Args:
          state: the position of the run, from where the alarm counts.
          alarm: the first bad step of this rank, counted from 1 since training began, and its loss.
          allgather: collects one small object per rank, in the order of ranks.
          highest: the loss in nats above which the alarm goes off, for the message.
          behind: the number of the last steps that are not in the alarm yet.
        """
        self._state = state
        self._alarm = alarm
        self._allgather = allgather
        self._highest = highest
        self._behind = behind
        self._began = self._seen = state.step

    def look(self) -> None:
        """Checks the loss, unless this step was checked before; every rank calls it at the same steps.

        Raises:
          DivergedError: on all ranks, if a loss was not finite or too high.
        """
        if self._seen == self._state.step:
            return
        self._seen = self._state.step - self._behind()
        raised = [alarm for alarm in self._allgather(self._alarm()) if alarm is not None]
        if raised:
            step, loss = min(raised, key=lambda alarm: alarm[0])
            why = f"above 100 ln(classes) = {self._highest:.4g}" if math.isfinite(loss) else "not finite"
            raise DivergedError(f"step {self._began + step}: the loss is {loss:.4g}, {why}: {_REMEDY}", loss)
