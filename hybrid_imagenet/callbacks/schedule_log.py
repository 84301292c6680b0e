"""Logs the values of schedules in `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer


class ScheduleLog(TrainingCallback):
    """Adds the schedule's values of the last step to the logs of each epoch.

    It is one of `default_callbacks()`. Only values that the optimizer uses are logged. With several
    optimizers, each name begins with the optimizer's.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None:
            return
        optimizers = {
            name: optimizer
            for name, optimizer in self.run.optimizers.items()
            if getattr(optimizer, "schedule", None) is not None
        }
        for name, optimizer in optimizers.items():
            prefix = "" if len(optimizers) == 1 else f"{name}."
            values = optimizer.schedule_values
            logs.update({prefix + key: values[key] for key in _used_values(optimizer, values)})


def _used_values(optimizer: Any, values: Mapping[str, float]) -> list[str]:
    """Returns the names of the values of a schedule that an optimizer uses."""
    inner = getattr(optimizer, "inner", optimizer)
    if isinstance(inner, GroupedOptimizer) and inner.num_phases > 1:
        return list(values)
    used_names = ["learning_rate"]
    if isinstance(inner, GroupedOptimizer):
        used_names.append("momentum")
    return [name for name in used_names if name in values]
