"""Sums of the gradients of micro-batches between two updates."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from hybrid_imagenet.comm.communicator import Communicator
from hybrid_imagenet.optimizers.overwritten import is_overwritten, replace_nan


class GradientAccumulator:
    """Owns one float32 sum per trainable variable, on this rank.

    Of a variable that is overwritten (`optimizers.overwritten`) it is a maximum, which starts at 0
    as in Keras.

    The first k - 1 micro-batches of an update go through `add`. The last one goes through `mean`,
    whose result is reduced over ranks and applied, and then `reset`.
    """

    def __init__(self) -> None:
        """Starts without sums; `build` creates them."""
        self.sums: list[keras.Variable] = []
        self._is_overwritten: list[bool] = []

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the sums, as large as the weights; does nothing if they exist."""
        if self.sums:
            return
        for variable in variables:
            self._is_overwritten.append(is_overwritten(variable))
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
            total = self.sums[i].value
            value = tf.cast(gradient, tf.float32)
            if self._is_overwritten[i]:
                total.assign(tf.maximum(total, replace_nan(value)))
            else:
                total.assign_add(value)

    def mean(
        self, gradients: Sequence[tf.Tensor], micro_batches: tf.Tensor | int
    ) -> list[tf.Tensor]:
        """Returns the mean over micro-batches, whose last one has these gradients.

        For a variable that is overwritten it is the largest new value, as in Keras.

        Args:
          gradients: of the last micro-batch.
          micro_batches: number of micro-batches of the update, this one included.
        """
        means = []
        for i, gradient in enumerate(gradients):
            total = self.sums[i].value
            value = tf.cast(gradient, tf.float32)
            if self._is_overwritten[i]:
                means.append(tf.maximum(total, replace_nan(value)))
            else:
                means.append((total + value) / micro_batches)
        return means

    def average_over_ranks(self, communicator: Communicator) -> None:
        """Replaces the sums by their mean over ranks, and the maxima by those over ranks."""
        for i, total in enumerate(self.sums):
            name = f"accumulated_{i}"
            if self._is_overwritten[i]:
                total.assign(communicator.allreduce_max(total.value, name))
            else:
                total.assign(communicator.allreduce_sum(total.value, name) / communicator.size)

    def reset(self) -> None:
        """Sets the sums to zero, after an update."""
        for total in self.sums:
            total.value.assign(tf.zeros_like(total.value))
