"""Logs the costs of communication, input and checkpoints in each epoch."""

from __future__ import annotations

from typing import Any

from hybrid_imagenet.callbacks.save_checkpoints import SaveCheckpoints
from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.data.sources.source import ReadCounter
from hybrid_imagenet.optimizers.reducer import GradientReducer


class CostLog(TrainingCallback):
    """Logs seconds of communication, the slowest rank, data read, and seconds of checkpoints.

    All ranks leave a reduction at the same time, but the slowest rank enters it last and so waits
    for the shortest time. That time is the cost of the communication itself. The ranks wait longer
    than that by `slowest_rank_seconds` on average, which each step loses to the slowest rank.
    """

    def __init__(
        self, reads: ReadCounter, save_callback: SaveCheckpoints, reducer: GradientReducer
    ):
        """Sets the sources of the costs of this rank.

        Args:
          reads: Counts training data read.
          save_callback: Measures the seconds of checkpoints.
          reducer: Measures the seconds of reductions.
        """
        super().__init__()
        self._reads = reads
        self._save_callback = save_callback
        self._reducer = reducer

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to count at the present values of the counters."""
        self._earlier_bytes = self._reads.bytes_read
        self._earlier_operations = self._reads.operations

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Gathers the counters of all ranks; every rank calls it."""
        assert logs is not None
        bytes_read = self._reads.bytes_read
        operations = self._reads.operations
        costs = {
            "exposed_ms": self._reducer.statistics().get("exposed_ms"),
            "bytes_read": bytes_read - self._earlier_bytes,
            "reads": operations - self._earlier_operations,
        }
        self._earlier_bytes = bytes_read
        self._earlier_operations = operations
        costs_of_ranks = self.communicator.allgather_object(costs)
        logs["bytes_read"] = sum(rank_costs["bytes_read"] for rank_costs in costs_of_ranks)
        logs["reads"] = sum(rank_costs["reads"] for rank_costs in costs_of_ranks)
        logs["checkpoint_seconds"] = self._save_callback.take_seconds()
        exposed_ms = [rank_costs["exposed_ms"] for rank_costs in costs_of_ranks]
        # On GPUs and for a single rank, steps are not timed.
        if None not in exposed_ms:
            seconds = [milliseconds / 1000 for milliseconds in exposed_ms]
            shortest = min(seconds)
            logs["communication_seconds"] = shortest
            logs["slowest_rank"] = seconds.index(shortest)
            logs["slowest_rank_seconds"] = sum(seconds) / len(seconds) - shortest
