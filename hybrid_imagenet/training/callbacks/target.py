"""Ends a run once its validation accuracy reaches a target."""

from __future__ import annotations

from typing import Any

import keras

from hybrid_imagenet.checkpoints.run_state import RunState


class BestAndTarget(keras.callbacks.Callback):
    """Keeps the best validation top-1, and stops after the validation that reaches a target."""

    def __init__(self, state: RunState, stop_at_top1: float | None):
        """`stop_at_top1` is a fraction; None never stops."""
        super().__init__()
        self._state = state
        self._target = stop_at_top1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares the epoch's top-1, which is the same on every rank."""
        top1 = (logs or {}).get("val_top1")
        if top1 is None:
            return
        if top1 > self._state.best_top1 or not self._state.best_epoch:
            self._state.best_top1, self._state.best_epoch = float(top1), (logs or {}).get("epoch", epoch + 1)
        if self._target is not None and top1 >= self._target:
            self._state.stop = "target"
