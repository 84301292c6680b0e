"""Holds and releases state that a method needs for a part of the run only."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


class ReleasableVariable(keras.Variable):
    """A float32 variable whose memory can be given back between steps, while graphs that refer to it stay valid.

    TensorFlow is told no shape for it; users of its value in a graph restore the shape with `tf.ensure_shape`.
    """

    def _initialize(self, value: Any) -> None:
        self._value = tf.Variable(value, dtype=self._dtype, trainable=False, name=self.name, shape=tf.TensorShape(None))

    def release(self) -> None:
        """Gives the memory back; the variable then has shape (0,)."""
        self._shape = (0,)
        self._value.assign(np.zeros(0, np.float32))
