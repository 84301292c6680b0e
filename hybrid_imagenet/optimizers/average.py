"""Keeps a moving average of the weights on the device."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf


class WeightAverage:
    """Keeps an exponential moving average of the weights, in float32.

    After update t, counted from 1 (skipped steps do not count), the average s of each weight w is:

        d = min(decay, (1 + t) / (10 + t))
        s = d s + (1 - d) w

    s starts from the first weights, and d is ramped up as shown, so that these are soon forgotten:
    after 90 updates the average reaches back over at most about ten. With `every` k above 1, the
    average is updated only after every k-th update of the weights, with d^k instead of d, which
    takes a k-th of the work. The weights are the same on every rank after each update, so the
    averages are too, without communication.

    Example:
      average = hi.optimizers.WeightAverage(0.999)
      optimizer = hi.DistributedOptimizer(hi.optimizers.SGD(0.1), average=average)
      callbacks = [*hi.callbacks.default_callbacks(), hi.callbacks.SwapAveragedWeights(average)]

    Args:
      decay: Decay d after the ramp, below 1; the average reaches back over about 1 / (1 - decay)
        updates.
      every: Number k of updates of the weights per update of the average (default: 1).

    Reference:
      Polyak, Juditsky, SIAM J. Control 30, 1992; Szegedy et al., arXiv 1512.00567, 8.
    """

    def __init__(self, decay: float, every: int = 1):
        self._decay = decay
        self._every = every
        self._weights: list[keras.Variable] = []
        self._averages: list[keras.Variable] = []
        # Whether steps of this process update it, or a checkpoint has restored it.
        self.follows_weights = False

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the averages of these trainable variables, equal to them."""
        self._weights = list(variables)
        # From copies of the values, because Keras would share a tf.Variable that is passed to it.
        self._averages = [
            keras.Variable(v.numpy(), trainable=False, name=f"{v.name}_average") for v in variables
        ]
        self.follows_weights = False
        # Each `build` needs its own trace, because a trace contains the variables.
        self._exchange = tf.function(self._exchange_values, autograph=False)

    def restart(self) -> None:
        """Sets the averages to the current weights."""
        for weight, average in zip(self._weights, self._averages, strict=True):
            average.assign(weight.value)

    @property
    def variables(self) -> Sequence[keras.Variable]:
        """The averages, in the order of the weights."""
        return self._averages

    def items(self) -> list[tuple[str, keras.Variable]]:
        """Returns the path of each weight with its average; paths may repeat."""
        pairs = zip(self._weights, self._averages, strict=True)
        return [(weight.path, average) for weight, average in pairs]

    def exchange(self) -> None:
        """Swaps the weights and the averages; a second call swaps them back."""
        if self._averages:
            self._exchange()

    def _exchange_values(self) -> None:
        for weight, average in zip(self._weights, self._averages, strict=True):
            old_weight = tf.identity(weight.value)
            weight.value.assign(average.value)
            average.value.assign(old_weight)

    def rate(self, t: tf.Tensor) -> tf.Tensor:
        """Returns how far the average moves to the weights after update t: s -= rate (s - w).

        It is 1 - d^k after every k-th update and 0 after the others; t is a float32 scalar,
        counted from 1.
        """
        decay = tf.minimum(self._decay, (1.0 + t) / (10.0 + t))
        if self._every == 1:
            return 1.0 - decay
        is_due = tf.equal(tf.math.floormod(t, float(self._every)), 0.0)
        return tf.where(is_due, 1.0 - decay**self._every, 0.0)
