"""Keeps the best validation accuracy, and stops at a target."""

from __future__ import annotations

from typing import Any

from hybrid_imagenet.callbacks.training_callback import TrainingCallback


class StopAtTarget(TrainingCallback):
    """Stops training after the validation that reaches an accuracy.

    Pass it on every rank, after `default_callbacks()`. Time to a target accuracy is the measure of
    MLPerf and of the HAL benchmark.

    Example:
      callbacks = [*hi.callbacks.default_callbacks(), hi.callbacks.StopAtTarget(0.97)]

    Args:
      target: Accuracy as a fraction, compared with `logs[monitor]`; None only keeps the best.
      monitor: Name of the accuracy in the logs (default: "val_accuracy").
    """

    def __init__(self, target: float | None, *, monitor: str = "val_accuracy"):
        super().__init__()
        self._target = target
        self._monitor = monitor

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs or {}
        accuracy = logs.get(self._monitor)
        if accuracy is None:
            return
        state = self.run.state
        if accuracy > state.best_top1 or not state.best_epoch:
            state.best_top1 = float(accuracy)
            state.best_epoch = logs.get("epoch", epoch + 1)
        if self._target is not None and accuracy >= self._target:
            self.run.request_stop("target")
