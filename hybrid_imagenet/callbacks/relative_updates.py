"""Logs how large updates are, compared with the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.callbacks.training_callback import TrainingCallback


class RelativeUpdates(TrainingCallback):
    """Logs `relative_updates`: |update| / |weights| of each kernel in the last step of an epoch.

    The update is what the step has changed, with momentum and weight decay, so it means the same
    for every optimizer and phase. The kernels are copied before that step and compared after it, on
    their device; the host reads the ratios with the epoch's other values.

    Attributes:
      ratios: Ratios of the last whole epoch, float32 [kernels]; part of a checkpoint, which may be
        between an epoch's last step and its record.
    """

    def __init__(self, kernels: Sequence[keras.Variable]):
        """Takes the kernels, the weights of convolutions and dense layers."""
        super().__init__()
        self._names = [kernel.path for kernel in kernels]
        self.ratios = keras.Variable(
            np.zeros(len(kernels), np.float32), trainable=False, name="relative_updates"
        )
        self._copy = tf.function(
            lambda: [tf.identity(kernel.value) for kernel in kernels], autograph=False
        )

        def compare(before: list[tf.Tensor]) -> None:
            pairs = zip(kernels, before, strict=True)
            self.ratios.assign(
                tf.stack([tf.norm(kernel.value - old) / tf.norm(old) for kernel, old in pairs])
            )

        self._compare = tf.function(compare, autograph=False)
        self._before: list[tf.Tensor] | None = None

    def variables(self) -> Mapping[str, keras.Variable]:
        return {"record/relative_updates": self.ratios}

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Copies the kernels if an epoch ends in the next step."""
        span = self.run.span
        if self._names and math.floor(span.end) > math.floor(span.start):
            self._before = self._copy()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._before is not None:
            self._compare(self._before)
            self._before = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the ratios where whole epochs are done, and none within one."""
        if logs is None or not self._names or not float(logs["epoch"]).is_integer():
            return
        ratios = self.ratios.numpy().tolist()
        logs["relative_updates"] = dict(zip(self._names, ratios, strict=True))
