"""Ends training that has diverged, on all ranks at the same step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.resilience.rollback import DivergedError

_DECAY = 0.9  # of the running value, per look
_REMEDY = "training has diverged; lower --lr or lengthen --warmup_epochs and start anew, or start with --rollback=3"


class DivergenceGuard(keras.callbacks.Callback):
    """Reads the loss alarm of every rank, and compares the training loss with its running value if asked to.

    It looks wherever metrics are fetched, before validation, at the end of each epoch and of training, and before what
    is saved (`look`). The running value is an exponential average over the looks that fetch metrics.

    The loss of a step is computed with the weights before it; so what a look finds good is a checkpoint up to the step
    before, whose number it keeps in the state.
    """

    def __init__(
        self,
        state: RunState,
        alarm: Callable[[], tuple[int, float] | None],
        allgather: Callable[[Any], list[Any]],
        highest: float,
        factor: float | None = None,
        behind: Callable[[], int] = lambda: 0,
    ):
        """Takes what to look at.

        Args:
          state: the position of the run.
          alarm: the first bad step of this rank, counted from 1 since training began, and its loss.
          allgather: collects one small object per rank, in the order of ranks.
          highest: the loss in nats above which the alarm goes off, for the message.
          factor: the training loss has diverged above so many times its running value; None compares nothing.
          behind: the number of the last steps of which the alarm does not tell yet.
        """
        super().__init__()
        self._state = state
        self._alarm = alarm
        self._allgather = allgather
        self._highest = highest
        self._factor = factor
        self._behind = behind
        self._began = self._seen = state.step

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._began = self._seen = self._state.step

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks where the metrics were fetched; raises DivergedError on all ranks."""
        if logs and "train_loss" in logs:
            self.look(logs["train_loss"])

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks before validation; raises DivergedError on all ranks."""
        self.look()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks before the epoch is recorded; raises DivergedError on all ranks."""
        self.look()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Checks before the end of the run; raises DivergedError on all ranks."""
        self.look()

    def look(self, train_loss: float | None = None) -> None:
        """Checks the loss, unless this step was checked before; every rank calls it at the same steps.

        Args:
          train_loss: the mean training loss of this rank since the last fetch, if it was fetched.

        Raises:
          DivergedError: on all ranks, if a loss was not finite or too high.
        """
        if train_loss is None and self._seen == self._state.step:
            return
        self._seen = self._state.step - self._behind()
        alarms, losses = zip(*self._allgather((self._alarm(), train_loss)), strict=True)
        raised = [alarm for alarm in alarms if alarm is not None]
        if raised:
            step, loss = min(raised, key=lambda alarm: alarm[0])
            why = f"above 100 ln(classes) = {self._highest:.4g}" if math.isfinite(loss) else "not finite"
            self._raise(f"step {self._began + step}: the loss is {loss:.4g}, {why}", loss)
        if self._factor is None:
            self._state.good_step = max(self._seen - 1, 0)
        elif train_loss is not None:
            self._compare(sum(losses) / len(losses), self._factor)

    def _compare(self, loss: float, factor: float) -> None:
        state = self._state
        running = state.running_loss
        if not math.isfinite(loss) or (running is not None and loss > factor * running):
            before = "the first look" if running is None else f"a running value of {running:.4g}"
            self._raise(
                f"step {state.step}: the loss is {loss:.4g} after {before} (--divergence_factor={factor:g})", loss
            )
        state.running_loss = loss if running is None else _DECAY * running + (1 - _DECAY) * loss
        state.good_step = max(self._seen - 1, 0)

    def _raise(self, what: str, loss: float) -> None:
        raise DivergedError(f"{what}: {_REMEDY}", self._state, loss)
