"""Keeps a running average of the weights on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf


class WeightAverage:
    """An exponential moving average s of each weight w (Polyak, Juditsky, SIAM J. Control 30, 1992;
    Szegedy et al., arXiv 1512.00567, 8), float32.

    After update number t, counted from 1 (skipped steps do not count):

        d = min(decay, (1 + t) / (10 + t));   s = d s + (1 - d) w

    s starts from the first weights, and d is ramped up as shown, so that these are soon forgotten:
    after 90 updates the average reaches back over ten, whatever the decay. With `every` k above 1
    the weights are taken in after every k-th update only, with d^k in place of d, for a k-th of the
    work. The update follows from weights that are the same on every rank, so the averages are the
    same too, without communication.
    """

    def __init__(self, decay: float, every: int = 1):
        """Averages over some 1 / (1 - `decay`) updates, of which it looks at every `every`-th."""
        self._decay = decay
        self._every = every
        self._weights: list[keras.Variable] = []
        self._averages: list[keras.Variable] = []

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the averages of these trainable variables, equal to them."""
        self._weights = list(variables)
        # Copies of the values: Keras would share a tf.Variable that it is given.
        self._averages = [
            keras.Variable(v.numpy(), trainable=False, name=f"{v.name}_average") for v in variables
        ]

    def restart(self) -> None:
        """Sets the averages to the weights as they are now."""
        for w, s in zip(self._weights, self._averages, strict=True):
            s.assign(w.value)

    @property
    def variables(self) -> Mapping[str, keras.Variable]:
        """The averages by the path of the variable that they are of, in their order."""
        return {w.path: s for w, s in zip(self._weights, self._averages, strict=True)}

    @tf.function(autograph=False)
    def exchange(self) -> None:
        """Puts the averages in place of the weights and the weights in place of the averages; its
        own inverse.
        """
        for w, s in zip(self._weights, self._averages, strict=True):
            weight = tf.identity(w.value)
            w.value.assign(s.value)
            s.value.assign(weight)

    def rate(self, t: tf.Tensor) -> tf.Tensor:
        """Returns how far the average moves to the weights after update t: s -= rate (s - w).

        It is 1 - d^k after every k-th update and 0 after the others; t is a float32 scalar,
        counted from 1.
        """
        decay = tf.minimum(self._decay, (1.0 + t) / (10.0 + t))
        if self._every == 1:
            return 1.0 - decay
        return tf.where(
            tf.equal(tf.math.floormod(t, float(self._every)), 0.0), 1.0 - decay**self._every, 0.0
        )
