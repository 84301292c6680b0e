"""Measures how large updates are beside the weights: the size at which methods and their hand-over can be compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class RelativeUpdates:
    """Gives `relative_updates`, |update| / |weights| of each kernel in the last step of an epoch.

    The update is what the step has changed, with momentum and weight decay: it means the same for every optimizer and
    phase. The kernels are copied before that step and compared after it, on their device; the host reads the ratios
    with the epoch's other values.

    Attributes:
      ratios: of the last whole epoch, float32 [kernels]; part of a checkpoint, which may lie between an epoch's last
        step and its record.
    """

    def __init__(self, kernels: Sequence[keras.Variable]):
        """`kernels`: the weights of convolutions and dense layers."""
        self._names = [kernel.path for kernel in kernels]
        self.ratios = keras.Variable(np.zeros(len(kernels), np.float32), trainable=False, name="relative_updates")
        self._copy = tf.function(lambda: [tf.identity(kernel.value) for kernel in kernels], autograph=False)

        def compare(before: list[tf.Tensor]) -> None:
            pairs = zip(kernels, before, strict=True)
            self.ratios.assign(tf.stack([tf.norm(kernel.value - old) / tf.norm(old) for kernel, old in pairs]))

        self._compare = tf.function(compare, autograph=False)
        self._before: list[tf.Tensor] | None = None

    def step_begins(self, start: float, end: float) -> None:
        """Copies the kernels if an epoch ends in the step over the fractional epochs `start` to `end`."""
        if self._names and math.floor(end) > math.floor(start):
            self._before = self._copy()

    def step_ends(self) -> None:
        """Compares them with what the step has made of them."""
        if self._before is not None:
            self._compare(self._before)
            self._before = None

    def of_epoch(self, epochs: float) -> dict[str, Any]:
        """Fetches the ratios where whole epochs are done, and none inside of one."""
        if not self._names or not float(epochs).is_integer():
            return {}
        return {"relative_updates": dict(zip(self._names, self.ratios.numpy().tolist(), strict=True))}
