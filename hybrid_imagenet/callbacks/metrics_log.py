"""Writes the records of training."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.comm import process
from hybrid_imagenet.optimizers import compiled_model
from hybrid_imagenet.runlog.jsonl import MetricsWriter


class RecordSink(Protocol):
    """Receives the records of a run."""

    def step(self, step: int, position: float, record: Mapping[str, Any] | None) -> None:
        """Takes the record of a step, or None if no values were fetched for it.

        Args:
          step: Number of steps done.
          position: Fractional epochs done.
          record: Values by name.
        """

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Takes the record of an epoch."""


class MetricsLog(TrainingCallback):
    """Writes the logs of epochs to a file, one JSON object per line.

    In `fit` it writes a record per epoch, on rank 0; a run that continues at a later epoch appends.
    Pass it after callbacks that add to the logs. The program passes a sink that also shows the
    records and writes them for TensorBoard.

    Example:
      callbacks = [*hi.callbacks.default_callbacks(), hi.callbacks.MetricsLog("metrics.jsonl")]

    Args:
      path: The file (default: None, if there is a sink).
      sink: Receives the records instead of a file (default: None).

    Raises:
      ValueError: Unless there is either a path or a sink.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, sink: RecordSink | None = None
    ):
        super().__init__()
        if (path is None) == (sink is None):
            raise ValueError("MetricsLog takes either a path or a sink")
        self._path = path
        self._sink = sink
        self._file: _JsonLines | None = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # The first epoch is not known earlier: another callback may have restored it.
        if self._path is not None and self._file is None and process.rank() == 0:
            self._file = _JsonLines(self._path, epoch)
            self._sink = self._file

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._sink is not None:
            self._sink.step(self.run.state.step, self.run.position, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._sink is None:
            return
        # The program's logs have the step and the fractional epoch.
        record = {"epoch": epoch + 1, **(logs or {})}
        if "step" not in record:
            record["step"] = compiled_model.updates_applied(self.model)
        self._sink.epoch(record)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._sink = None


class _JsonLines:
    """Writes epoch records to a file."""

    def __init__(self, path: str | os.PathLike[str], first_epoch: int):
        # The number of epochs alone decides which records are removed, because they are written
        # again.
        self._writer = MetricsWriter(path, resume_from=(sys.maxsize, float(first_epoch)))

    def step(self, step: int, position: float, record: Mapping[str, Any] | None) -> None:
        pass

    def epoch(self, record: Mapping[str, Any]) -> None:
        self._writer.write({"kind": "epoch", **record})

    def close(self) -> None:
        self._writer.close()
