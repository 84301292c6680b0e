"""Logs what communication, input and checkpoints have cost in an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.data.sources.source import ReadCounter


class CostLog(TrainingCallback):
    """Logs seconds of communication, the slowest rank, data read, and seconds of checkpoints.

    All ranks leave a reduction at the same time. The slowest one enters it last and so waits least.
    The mean of what the others wait longer is the time that a step loses to it.
    """

    def __init__(
        self,
        communicator: Communicator,
        reads: ReadCounter,
        checkpoint_seconds: Callable[[], float],
        reduction_statistics: Callable[[], dict[str, Any]],
    ):
        """Sets the counters of this rank.

        Args:
          communicator: gathers the costs of all ranks.
          reads: counts training data read.
          checkpoint_seconds: returns the seconds of checkpoints since the last call.
          reduction_statistics: `GradientReducer.statistics`.
        """
        super().__init__(communicator)
        self._reads = reads
        self._checkpoint_seconds = checkpoint_seconds
        self._reduction_statistics = reduction_statistics

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to count."""
        self._earlier_bytes = self._reads.bytes_read
        self._earlier_operations = self._reads.operations

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Gathers the counters of all ranks; every rank calls it."""
        assert logs is not None
        bytes_read = self._reads.bytes_read
        operations = self._reads.operations
        rows = self.communicator.allgather_object(
            [
                self._reduction_statistics().get("exposed_ms"),
                bytes_read - self._earlier_bytes,
                operations - self._earlier_operations,
            ]
        )
        self._earlier_bytes = bytes_read
        self._earlier_operations = operations
        logs["bytes_read"] = sum(row[1] for row in rows)
        logs["reads"] = sum(row[2] for row in rows)
        logs["checkpoint_seconds"] = self._checkpoint_seconds()
        waits = [row[0] for row in rows]
        if None not in waits:
            seconds = [wait / 1000 for wait in waits]
            shortest = min(seconds)
            logs["communication_seconds"] = shortest
            logs["slowest_rank"] = seconds.index(shortest)
            logs["slowest_rank_seconds"] = sum(seconds) / len(seconds) - shortest
