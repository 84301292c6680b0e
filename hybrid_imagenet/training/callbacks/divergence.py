"""Notices that training has diverged, and asks to go back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.resilience.rollback import DivergedError

_DECAY = 0.9  # of the running value, per look


class DivergenceGuard(keras.callbacks.Callback):
    """Compares the training loss with `factor` times its running value, wherever the metrics are fetched.

    The running value is an exponential average over looks. The loss of a step is that of the weights before it; so
    what a look finds good is a checkpoint up to the step before, whose number it keeps in the state.
    """

    def __init__(self, state: RunState, factor: float, mean_over_ranks: Callable[[float], float]):
        """`mean_over_ranks` averages a number over ranks, which all call it at the same steps."""
        super().__init__()
        self._state = state
        self._factor = factor
        self._mean = mean_over_ranks

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks.

        Raises:
          DivergedError: on all ranks, if the loss is too high or not finite.
        """
        if not logs or "train_loss" not in logs:
            return
        loss, state = self._mean(logs["train_loss"]), self._state
        running = state.running_loss
        if not math.isfinite(loss) or (running is not None and loss > self._factor * running):
            before = "the first look" if running is None else f"a running value of {running:.4g}"
            raise DivergedError(
                f"step {batch}: the loss is {loss:.4g} after {before} (--divergence_factor={self._factor:g}): training "
                "has diverged; lower --lr or lengthen --warmup_epochs and start anew, or start with --rollback=3",
                state,
                loss,
            )
        state.running_loss = loss if running is None else _DECAY * running + (1 - _DECAY) * loss
        state.good_step = batch - 1
