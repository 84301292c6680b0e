"""Accumulates the gradients of micro-batches between two updates."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence

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
          gradients: Gradients of the last micro-batch.
          micro_batches: Number of micro-batches of the update, this one included.
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


class MicroBatchUse(enum.Enum):
    """How the gradients of a micro-batch are used, if they are accumulated."""

    ADD = "add to the sums"
    UPDATE = "update"


class MicroBatchCounter:
    """Counts micro-batches, and chooses between adding their gradients and updating.

    Attributes:
      steps: Number of micro-batches per update.
      count: Number of micro-batches so far, int64, the same on all ranks.
    """

    def __init__(self, steps: int) -> None:
        """Starts at 0."""
        self.steps = steps
        self.count = keras.Variable(0, dtype="int64", trainable=False, name="micro_batches")
        # The kind of micro-batch that is traced now; None for all kinds.
        self._traced_for: MicroBatchUse | None = None

    def read(self) -> int:
        """Returns the number of micro-batches so far; waits for a GPU."""
        return int(self.count.numpy())

    @contextlib.contextmanager
    def traced_for(self, micro_batch: MicroBatchUse) -> Iterator[None]:
        """Makes steps that are traced in this context right for one kind of micro-batch only."""
        before = self._traced_for
        self._traced_for = micro_batch
        try:
            yield
        finally:
            self._traced_for = before

    def choose(
        self, grads: Sequence[tf.Tensor], add: Callable[[], None], update: Callable[[], None]
    ) -> None:
        """Counts a micro-batch; calls `update` for the last one of an update and `add` for others.

        At the end of data of unknown length Keras begins one more step, in which reading the data
        fails. So the micro-batch is counted only when its gradients exist.

        Inside `traced_for` the kind of micro-batch is known when the graph is built. Without it
        there is a branch in the graph. The counter is the same on all ranks, so all take the same
        branch. On a GPU the host waits for the counter at every micro-batch. `fit` and the program
        choose on the host instead; a custom loop cannot, because one function of the user's serves
        all micro-batches.

        Args:
          grads: Gradients of the micro-batch.
          add: Adds them to the sums.
          update: Updates from the sums and these gradients.
        """
        with tf.control_dependencies(list(grads)):
            count = self.count.value + 1
            self.count.value.assign(count)
        if self._traced_for is MicroBatchUse.ADD:
            add()
        elif self._traced_for is MicroBatchUse.UPDATE:
            update()
        else:
            tf.cond(tf.equal(count % self.steps, 0), update, add)
