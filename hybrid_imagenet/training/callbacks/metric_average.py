"""Averages an epoch's metrics over all ranks from exact sums and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet.training.accumulators import from_vector


class MetricAverage(keras.callbacks.Callback):
    """Replaces the sums of an epoch by averages over the examples of all ranks.

    Sums and counts are added over ranks in float64 and divided once, so that the result does not depend on how the
    examples were shared out.
    """

    def __init__(self, allreduce_sum: Callable[[tf.Tensor, str], tf.Tensor]):
        """Takes the sum over ranks."""
        super().__init__()
        self._allreduce_sum = allreduce_sum

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts `train_loss`, `train_top1` and `train_top5` in the place of "sums"."""
        if logs is None:
            return
        local = logs.pop("sums")
        vector = tf.constant([local.loss, local.top1, local.top5, local.count], tf.float64)
        logs.update(from_vector(self._allreduce_sum(vector, "train_sums")).means("train"))
