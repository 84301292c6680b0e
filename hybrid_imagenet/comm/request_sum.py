"""Sums small counts of the hosts over ranks within a training step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.comm.communicator import Communicator


class RequestSum:
    """Counts of this rank, and their sum over ranks in the last step.

    The host sets the counts before a step, and a step sums them on the CPUs. So the host reads the
    sum without waiting for a GPU, and all ranks read the same sum after the same step.
    """

    def __init__(self, size: int) -> None:
        """Starts with counts of 0.

        Args:
          size: Number of counts.
        """
        with tf.device("CPU:0"):
            self._own = tf.Variable(
                tf.zeros([size], tf.int32), trainable=False, name="own_requests"
            )
            self._sum = tf.Variable(tf.zeros([size], tf.int32), trainable=False, name="requests")

    def reset(self) -> None:
        """Sets all counts to 0; every rank calls it, between two steps."""
        self._own.assign(tf.zeros_like(self._own))
        self._sum.assign(tf.zeros_like(self._sum))

    def set_own(self, counts: Sequence[int]) -> None:
        """Sets the counts of this rank for the steps that come next."""
        self._own.assign(counts)

    def sum_over(self, communicator: Communicator) -> None:
        """Sums the counts; a step calls it while it is traced."""
        with tf.device("CPU:0"):
            self._sum.assign(communicator.allreduce_on_host(self._own.read_value(), "requests"))

    def read(self) -> npt.NDArray[np.int32]:
        """Returns the sum of the last step, int32 [size]."""
        total: npt.NDArray[np.int32] = self._sum.numpy()
        return total
