"""Sums of the gradients of micro-batches between two updates."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from hybrid_imagenet.comm.communicator import Communicator


class GradientAccumulator:
    """Owns one float32 sum per trainable variable, on this rank.

    The first k - 1 micro-batches of an update go through `add`. The last one goes through `mean`,
    whose result is reduced over ranks and applied, and then `reset`.
    """

    def __init__(self) -> None:
        """Starts without sums; `build` creates them."""
        self.sums: list[keras.Variable] = []

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the sums, as large as the weights; does nothing if they exist."""
        if self.sums:
            return
        for variable in variables:
            self.sums.append(
                keras.Variable(
                    "zeros",
                    shape=variable.shape,
                    dtype="float32",
                    trainable=False,
                    name=f"{variable.name}_sum",
                )
            )

    def add(self, gradients: Sequence[tf.Tensor]) -> None:
        """Adds the gradients of a micro-batch to the sums."""
        for i, gradient in enumerate(gradients):
            self.sums[i].value.assign_add(tf.cast(gradient, tf.float32))

    def mean(
        self, gradients: Sequence[tf.Tensor], micro_batches: tf.Tensor | int
    ) -> list[tf.Tensor]:
        """Returns the mean over micro-batches, whose last one has these gradients.

        Args:
          gradients: of the last micro-batch.
          micro_batches: number of micro-batches of the update, this one included.
        """
        means = []
        for i, gradient in enumerate(gradients):
            total = self.sums[i].value + tf.cast(gradient, tf.float32)
            means.append(total / micro_batches)
        return means

    def average_over_ranks(self, communicator: Communicator) -> None:
        """Replaces the sums by their mean over ranks."""
        for i, total in enumerate(self.sums):
            sum_over_ranks = communicator.allreduce_sum(total.value, f"accumulated_{i}")
            total.assign(sum_over_ranks / communicator.size)

    def reset(self) -> None:
        """Sets the sums to zero, after an update."""
        for total in self.sums:
            total.value.assign(tf.zeros_like(total.value))
