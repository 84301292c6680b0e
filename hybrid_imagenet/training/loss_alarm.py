"""Judges the loss of every step on the device, so that divergence is noticed without a fetch."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet import xla

FACTOR = 100.0
"""A loss above this many times that of guesses has diverged."""


def highest_loss(classes: int, *, summed: bool = False) -> float:
    """Returns the highest loss in nats that is not divergence.

    Guesses have a loss of ln(classes).

    Args:
      classes: their number.
      summed: whether the loss is a sum over classes, of which each has ln 2 for guesses.
    """
    return FACTOR * (classes * math.log(2) if summed else math.log(max(classes, 2)))


class LossAlarm:
    """Notes the first step of which a micro-batch has a mean loss that is not finite or too high.

    `variable` is one float64 vector on the device: optimizer steps done, the first such step (from
    1; 0 for none), its loss.
    """

    def __init__(self, highest: float):
        """`highest` is the loss in nats above which it goes off."""
        self.highest = highest
        self.variable = tf.Variable(tf.zeros([3], tf.float64), trainable=False, name="loss_alarm")
        self._judged = xla.compile_on_gpu(self._after)

    def judge(self, losses: tf.Tensor) -> None:
        """Takes the losses of this rank's micro-batch, float32 [b], before the step that they
        belong to is done.
        """
        self.variable.assign(self._judged(losses, self.variable.read_value()))

    def _after(self, losses: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
        loss = tf.cast(tf.reduce_mean(losses), tf.float64)
        done, first, _ = tf.unstack(before)
        bad = tf.logical_not(loss <= self.highest)  # a NaN is not
        fresh = tf.logical_and(bad, tf.equal(first, 0.0))
        return tf.where(fresh, tf.stack([done, done + 1.0, loss]), before)

    def advance(self) -> None:
        """Counts a step."""
        self.variable.assign_add([1.0, 0.0, 0.0])

    def read(self, values: npt.ArrayLike | None = None) -> tuple[int, float] | None:
        """Returns the first bad step, counted from 1, and its loss; waits for the device, unless
        given the values.
        """
        _, first, loss = self.variable.numpy() if values is None else np.asarray(values)
        return (int(first), float(loss)) if first else None
