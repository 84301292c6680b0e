"""Writes the records of rank 0 to metrics.jsonl and shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from hybrid_imagenet.runlog.jsonl import MetricsWriter
from hybrid_imagenet.runlog.live import View


class RecordLog(keras.callbacks.Callback):
    """Writes step and epoch records to metrics.jsonl and shows them. For rank 0; called after all that add values."""

    def __init__(self, writer: MetricsWriter, view: View):
        super().__init__()
        self._writer = writer
        self._view = view
        self._epoch = 0
        self._global_batch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch + 1
        self._global_batch = (logs or {})["global_batch"]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Advances the view; writes a record where the metrics were fetched."""
        logs = logs or {}
        self._view.advance(batch, logs.get("position"))
        if "train_loss" in logs:
            record = {"kind": "step", "epoch": self._epoch, "global_batch": self._global_batch, **logs}
            record.pop("save", None)
            self._writer.write(record)
            self._view.step(record)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        record = {"kind": "epoch", "global_batch": self._global_batch, **(logs or {})}
        self._writer.write(record)
        self._view.epoch(record)


class EpochValues(keras.callbacks.Callback):
    """Adds `per_gpu_batch`, which batch normalization sees, `accumulation` and `image_size` to epoch records."""

    def __init__(self, facts: Callable[[int], Mapping[str, Any]]):
        """Takes `facts(epoch)`, which gives the values for an epoch counted from 0."""
        super().__init__()
        self._facts = facts

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self._facts(epoch))
