"""Judges the training loss of every step on the device, so that divergence is seen without a fetch per step."""

from __future__ import annotations

import math

import tensorflow as tf

FACTOR = 100.0
"""A loss above so many times the loss of uniform guesses, ln(classes), has diverged."""


def limit(classes: int) -> float:
    """Returns the highest loss in nats that is not divergence."""
    return FACTOR * math.log(max(classes, 2))


class LossAlarm:
    """Notes the first step of which a micro-batch has a mean loss that is not finite or too high.

    One float64 vector on the device: optimizer steps done, the first such step (from 1; 0 for none), its loss.
    """

    def __init__(self, highest: float):
        """`highest` is the loss in nats above which it goes off."""
        self.highest = highest
        self._variable = tf.Variable(tf.zeros([3], tf.float64), trainable=False, name="loss_alarm")

    def judge(self, losses: tf.Tensor) -> None:
        """Takes the losses of this rank's micro-batch, float32 [b], before the step that they belong to is done."""
        loss = tf.cast(tf.reduce_mean(losses), tf.float64)
        done, first, _ = tf.unstack(self._variable.read_value())
        bad = tf.logical_not(loss <= self.highest)  # a NaN is not
        fresh = tf.logical_and(bad, tf.equal(first, 0.0))
        self._variable.assign(tf.where(fresh, tf.stack([done, done + 1.0, loss]), self._variable.read_value()))

    def advance(self) -> None:
        """Counts a step."""
        self._variable.assign_add([1.0, 0.0, 0.0])

    def read(self) -> tuple[int, float] | None:
        """Returns the first bad step, counted from 1, and its loss; waits for the device."""
        _, first, loss = self._variable.numpy().tolist()
        return (int(first), loss) if first else None
