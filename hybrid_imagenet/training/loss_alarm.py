"""Checks the loss of every step on the device, so that divergence is noticed without a fetch."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet import xla

DIVERGENCE_FACTOR = 100.0
"""A loss above this many times the loss of random guesses has diverged."""


def highest_loss(classes: int, *, summed: bool = False) -> float:
    """Returns the highest loss, in nats, that does not count as divergence.

    Random guesses have a loss of ln(classes).

    Args:
      classes: Number of classes.
      summed: Whether the loss is a sum over classes, each of which has ln 2 for random guesses.
    """
    guesses = classes * math.log(2) if summed else math.log(max(classes, 2))
    return DIVERGENCE_FACTOR * guesses


class LossAlarm:
    """Records the first step in which the mean loss of a micro-batch is not finite or too high.

    Attributes:
      threshold: The alarm is raised above this loss, in nats.
      variable: float64 [3] on the device: steps done; the first bad step, counted from 1, or 0 if
        there is none; the loss of that step.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.variable = tf.Variable(tf.zeros([3], tf.float64), trainable=False, name="loss_alarm")
        self._next_state = xla.compile_on_gpu(self._check_state)

    def check(self, losses: tf.Tensor) -> None:
        """Checks a micro-batch of the current step, before `advance` counts that step.

        Args:
          losses: Losses of the images on this rank, float32 [b].
        """
        self.variable.assign(self._next_state(losses, self.variable.read_value()))

    def _check_state(self, losses: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
        """Returns the state after a micro-batch, in the form of `variable`."""
        loss = tf.cast(tf.reduce_mean(losses), tf.float64)
        steps_done, first_bad_step, _ = tf.unstack(state)
        # This form is true for NaN, which is not less than or equal to anything.
        is_bad = tf.logical_not(loss <= self.threshold)
        is_first = tf.logical_and(is_bad, tf.equal(first_bad_step, 0.0))
        return tf.where(is_first, tf.stack([steps_done, steps_done + 1.0, loss]), state)

    def advance(self) -> None:
        """Counts a step."""
        self.variable.assign_add([1.0, 0.0, 0.0])

    def read(self, state: npt.ArrayLike | None = None) -> tuple[int, float] | None:
        """Returns the number of the first bad step, from 1, and its loss; None if there is none.

        Args:
          state: Values of `variable`; without them they are fetched, which waits for the device.
        """
        values = self.variable.numpy() if state is None else np.asarray(state)
        _, first_bad_step, loss = values
        return (int(first_bad_step), float(loss)) if first_bad_step else None
