"""Records what an epoch cost besides computation: exposed communication, the slowest rank, and input read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.data.sources.base import IoStatistics


class Costs(keras.callbacks.Callback):
    """Adds `communication_seconds`, `slowest_rank`, `slowest_rank_seconds`, `bytes_read`, `reads` and
    `checkpoint_seconds` (of checkpoints since the last record) to epoch records.

    All ranks leave a reduction at the same time; the slowest enters it last and so waits least. The mean of what the
    others wait longer is the time that a step loses to it.
    """

    def __init__(
        self,
        communicator: Communicator,
        io_statistics: Callable[[], IoStatistics],
        checkpoint_seconds: Callable[[], float],
    ):
        """Takes this rank's counters of training data read, and the time of checkpoints."""
        super().__init__()
        self._checkpoint_seconds = checkpoint_seconds
        self._communicator = communicator
        self._io_statistics = io_statistics
        self._read = io_statistics()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Gathers the ranks' counters; every rank calls it."""
        read = self._io_statistics()
        exposed = self._communicator.statistics().get("exposed_ms")
        own = [exposed, read.bytes_read - self._read.bytes_read, read.operations - self._read.operations]
        self._read = read
        waits, read_bytes, reads = zip(*self._communicator.allgather_object(own), strict=True)
        if logs is None:
            return
        logs["bytes_read"], logs["reads"] = sum(read_bytes), sum(reads)
        logs["checkpoint_seconds"] = self._checkpoint_seconds()
        if None not in waits:
            seconds = [wait / 1000 for wait in waits]
            logs["communication_seconds"] = min(seconds)
            logs["slowest_rank"] = seconds.index(min(seconds))
            logs["slowest_rank_seconds"] = sum(seconds) / len(seconds) - min(seconds)


class WireHealthLog(keras.callbacks.Callback):
    """Adds what gradients lost in 16 bits to epoch records, and tells which layers' gradients overflowed.

    `gradient_elements` were counted, at some steps; of them, `gradient_overflow` were not finite as computed or became
    infinite on the wire, `gradient_underflow` became zero there, `gradient_zeros` were zero as computed.
    """

    def __init__(self, communicator: Communicator, message: Callable[[str], None]):
        """`message` shows a line; it is called on every rank."""
        super().__init__()
        self._communicator = communicator
        self._message = message

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Collects the counts over ranks; every rank calls it."""
        layers = self._communicator.gradient_health()
        if logs is not None and any(layer.elements for layer in layers):
            logs["gradient_elements"] = sum(layer.elements for layer in layers)
            logs["gradient_overflow"] = sum(layer.overflow + layer.nonfinite for layer in layers)
            logs["gradient_underflow"] = sum(layer.underflow for layer in layers)
            logs["gradient_zeros"] = sum(layer.zeros for layer in layers)
        for layer in layers:
            if layer.overflow or layer.nonfinite:
                rank = "" if layer.first_rank is None else f", first from rank {layer.first_rank}"
                self._message(
                    f"epoch {epoch + 1}: gradient of {layer.name}: {layer.overflow} overflowed on the wire, "
                    f"{layer.nonfinite} were not finite before{rank}, {layer.underflow} of {layer.elements} vanished"
                )
