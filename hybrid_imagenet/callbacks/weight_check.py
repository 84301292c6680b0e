"""Compares the weights of all ranks after each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.comm.agreement import checksum
from hybrid_imagenet.errors import NumericsError


class WeightCheck(TrainingCallback):
    """Compares a checksum of the weights over ranks after every epoch.

    The error names the ranks that differ.
    """

    def __init__(self, variables: Sequence[keras.Variable]):
        """Takes the weights."""
        super().__init__()
        self._checksum = tf.function(lambda: checksum(variables), autograph=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares the checksums; every rank calls it.

        Raises:
          NumericsError: On every rank, if the weights are not the same everywhere.
        """
        sums = self.communicator.allgather_object(int(self._checksum().numpy()))
        majority = max(sums, key=sums.count)
        differing = [str(rank) for rank, value in enumerate(sums) if value != majority]
        if differing:
            raise NumericsError(
                f"epoch {epoch + 1}: the weights of rank {', '.join(differing)} differ from those"
                " of the other ranks. Check that host's memory and drivers, and start again with"
                " --resume."
            )
