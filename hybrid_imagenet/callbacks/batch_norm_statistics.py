"""Merges batch-normalization statistics over ranks, or measures them over several batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.models import moments

Pairs = Sequence[tuple[keras.Variable, keras.Variable]]
"""The (mean, variance) of each layer."""


class BatchNormStatistics:
    """Merges the statistics of each rank over all ranks, in float32.

    With mu_i and var_i the statistics of the last iteration (or the moving averages) on rank i:

        mu = mean_i(mu_i),   var = max(mean_i(var_i + mu_i^2) - mu^2, 0)

    The means of squares are averaged, because the mean of the variances would omit the variance
    between ranks. All layers share one all-reduce.

    Reference: Lu et al. §2.2.3-1; Mikami et al. §3.2.
    """

    def __init__(
        self,
        communicator: Communicator,
        statistics: Pairs,
        collect: Callable[[], None] | None = None,
        merge_parts: Callable[[], None] = lambda: None,
        dtype: tf.DType = tf.float32,
    ):
        """Takes the statistics.

        Args:
          communicator: The ranks.
          statistics: (mean, variance) of every layer.
          collect: Called first, to measure this rank's statistics if training has not left them
            (`PreciseStatistics`).
          merge_parts: Gives the virtual GPUs of this rank its merged statistics to continue from.
          dtype: Type in which they are merged. If a feature has a mean of thousands of standard
            deviations, as a year may have, float32 has no digits left for its variance.
        """
        self._dtype = dtype
        self._communicator = communicator
        self._statistics = list(statistics)
        self._collect = collect
        self._merge_parts = merge_parts
        self._graph = tf.function(self._merge, autograph=False)

    def synchronize(self) -> None:
        """Merges the statistics; every rank must call it."""
        if self._collect is not None:
            self._collect()
        self._merge_parts()
        if self._statistics and self._communicator.size > 1:
            self._graph()

    def _merge(self) -> None:
        means = tf.concat(
            [tf.cast(mean.value, self._dtype) for mean, _ in self._statistics], axis=0
        )
        variances = tf.concat(
            [tf.cast(variance.value, self._dtype) for _, variance in self._statistics], axis=0
        )
        both = tf.stack([means, moments.second_moment(means, variances, tf)])
        both = both / self._communicator.size
        summed = self._communicator.allreduce_sum(both, "batch_norm_statistics")
        mean, square = tf.unstack(summed)
        variance = moments.biased_variance(mean, square, tf)
        sizes = [int(m.shape[0]) for m, _ in self._statistics]
        merged = zip(tf.split(mean, sizes), tf.split(variance, sizes), strict=True)
        for variables, values in zip(self._statistics, merged, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(tf.cast(value, variable.dtype))


class PreciseStatistics:
    """Replaces the running statistics by statistics of several batches under frozen weights.

    Each batch is run forward in training mode, which leaves its mean mu_j and biased variance
    var_j. The result is

        mu = mean_j(mu_j),   var = max(mean_j(var_j + mu_j^2) - mu^2, 0)

    as if the batches were one.

    Reference: Wu, Johnson, Rethinking "Batch" in BatchNorm, arXiv 2105.07576, section 3.
    """

    def __init__(
        self,
        forward: Callable[[Mapping[str, tf.Tensor]], Any],
        statistics: Pairs,
        batches: Callable[[], Iterable[Mapping[str, tf.Tensor]]],
        state: RunState,
    ):
        """Takes the statistics.

        Args:
          forward: Runs a batch in training mode and updates nothing but the statistics.
          statistics: (mean, variance) of every layer.
          batches: Returns the batches.
          state: Position of the run; nothing is measured twice after the same step.
        """
        self._forward = tf.function(forward, autograph=False)
        self._statistics = list(statistics)
        self._batches = batches
        self._state = state
        self._collected_at: int | None = None

    def collect(self) -> None:
        """Measures and replaces this rank's statistics."""
        if self._collected_at == self._state.step:
            return
        self._collected_at = self._state.step
        totals = [np.zeros((2, mean.shape[0]), np.float64) for mean, _ in self._statistics]
        count = 0
        for batch in self._batches():
            self._forward(batch)
            count += 1
            for total, (mean, variance) in zip(totals, self._statistics, strict=True):
                mu = mean.numpy().astype(np.float64)
                total += [mu, moments.second_moment(mu, variance.numpy())]
        for total, (mean, variance) in zip(totals, self._statistics, strict=True):
            mu, square = total / count
            mean.assign(mu.astype(np.float32))
            variance.assign(moments.biased_variance(mu, square).astype(np.float32))
