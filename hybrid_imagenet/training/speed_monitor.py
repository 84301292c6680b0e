"""Records what an epoch cost besides computation: exposed communication, the slowest rank, and input read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.data.sources.base import IoStatistics


class Costs:
    """Gives `communication_seconds`, `slowest_rank`, `slowest_rank_seconds`, `bytes_read`, `reads` and
    `checkpoint_seconds` (of checkpoints since the last record) of an epoch.

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
        self._checkpoint_seconds = checkpoint_seconds
        self._communicator = communicator
        self._io_statistics = io_statistics
        self._read = io_statistics()

    def __call__(self, epoch: int) -> dict[str, Any]:
        """Gathers the ranks' counters; every rank calls it."""
        read = self._io_statistics()
        exposed = self._communicator.statistics().get("exposed_ms")
        own = [exposed, read.bytes_read - self._read.bytes_read, read.operations - self._read.operations]
        self._read = read
        waits, read_bytes, reads = zip(*self._communicator.allgather_object(own), strict=True)
        values = {
            "bytes_read": sum(read_bytes),
            "reads": sum(reads),
            "checkpoint_seconds": self._checkpoint_seconds(),
        }
        if None not in waits:
            seconds = [wait / 1000 for wait in waits]
            values["communication_seconds"] = min(seconds)
            values["slowest_rank"] = seconds.index(min(seconds))
            values["slowest_rank_seconds"] = sum(seconds) / len(seconds) - min(seconds)
        return values


class GradientHealth:
    """Gives what gradients lost in 16 bits in an epoch, and tells which layers' gradients overflowed.

    `gradient_elements` were counted, at some steps; of them, `gradient_overflow` were not finite as computed or became
    infinite on the wire, `gradient_underflow` became zero there, `gradient_zeros` were zero as computed.
    """

    def __init__(self, communicator: Communicator, message: Callable[[str], None]):
        """`message` shows a line; it is called on every rank."""
        self._communicator = communicator
        self._message = message

    def __call__(self, epoch: int) -> dict[str, int]:
        """Collects the counts over ranks; every rank calls it."""
        layers = self._communicator.gradient_health()
        for layer in layers:
            if layer.overflow or layer.nonfinite:
                rank = "" if layer.first_rank is None else f", first from rank {layer.first_rank}"
                self._message(
                    f"epoch {epoch + 1}: gradient of {layer.name}: {layer.overflow} overflowed on the wire, "
                    f"{layer.nonfinite} were not finite before{rank}, {layer.underflow} of {layer.elements} vanished"
                )
        if not any(layer.elements for layer in layers):
            return {}
        return {
            "gradient_elements": sum(layer.elements for layer in layers),
            "gradient_overflow": sum(layer.overflow + layer.nonfinite for layer in layers),
            "gradient_underflow": sum(layer.underflow for layer in layers),
            "gradient_zeros": sum(layer.zeros for layer in layers),
        }
