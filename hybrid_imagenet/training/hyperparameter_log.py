"""Logs the values of the schedule."""

from __future__ import annotations

from typing import Any

from hybrid_imagenet.callbacks.training_callback import TrainingCallback


class HyperparameterLog(TrainingCallback):
    """Logs the values of the schedule in the last step, even if it was before a restart."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the values to the logs of a step, if there are any."""
        if logs is not None:
            self._add(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the values to the logs of an epoch."""
        if logs is not None:
            self._add(logs)

    def _add(self, logs: dict[str, Any]) -> None:
        logs |= self.run.state.schedule_values
