"""One final synchronization of batch-normalization statistics over all GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

Pairs = Sequence[tuple[keras.Variable, keras.Variable]]


class BatchNormSync(keras.callbacks.Callback):
    """Merges the per-GPU statistics over all ranks, in float32, before every validation (H 2.2.3-1; S 3.2).

    With mu_i and var_i the statistics of the last iteration (or the moving averages) on rank i:

        mu = mean_i(mu_i),   var = max(mean_i(var_i + mu_i^2) - mu^2, 0)

    The means of squares are averaged, not the variances, which would leave out the variance between ranks. All layers
    travel in one all-reduce. A checkpoint calls `synchronize` too.
    """

    def __init__(self, allreduce_sum: Callable[[tf.Tensor, str], tf.Tensor], size: int, statistics: Pairs):
        """Takes the sum over `size` ranks and the (mean, variance) variables of every layer."""
        super().__init__()
        self._allreduce_sum = allreduce_sum
        self._size = size
        self._statistics = list(statistics)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Synchronizes before validation."""
        self.synchronize()

    def synchronize(self) -> None:
        """Merges the statistics; every rank must call it."""
        if self._statistics and self._size > 1:
            self._merge()

    @tf.function(autograph=False)
    def _merge(self) -> None:
        means = tf.concat([tf.cast(mean.value, tf.float32) for mean, _ in self._statistics], axis=0)
        variances = tf.concat([tf.cast(variance.value, tf.float32) for _, variance in self._statistics], axis=0)
        both = tf.stack([means, variances + tf.square(means)]) / self._size
        mean, square = tf.unstack(self._allreduce_sum(both, "batch_norm_statistics"))
        variance = tf.maximum(square - tf.square(mean), 0.0)
        sizes = [int(m.shape[0]) for m, _ in self._statistics]
        merged = zip(tf.split(mean, sizes), tf.split(variance, sizes), strict=True)
        for (mean_variable, variance_variable), (new_mean, new_variance) in zip(self._statistics, merged, strict=True):
            mean_variable.assign(new_mean)
            variance_variable.assign(new_variance)
