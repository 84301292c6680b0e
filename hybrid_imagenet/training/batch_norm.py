"""Merges batch-normalization statistics over all GPUs before validation, or measures them again."""

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


class BatchNormStatistics:
    """Merges the per-GPU statistics over all ranks, in float32, before every validation and
    checkpoint.

    With mu_i and var_i the statistics of the last iteration (or the moving averages) on rank i:

        mu = mean_i(mu_i),   var = max(mean_i(var_i + mu_i^2) - mu^2, 0)

    The means of squares are averaged, not the variances, which would leave out the variance between
    ranks. All layers go into one all-reduce. (Lu et al. §2.2.3-1; Mikami et al. §3.2.)
    """

    def __init__(
        self,
        ranks: Communicator,
        statistics: Pairs,
        collect: Callable[[], None] | None = None,
        merge_parts: Callable[[], None] = lambda: None,
    ):
        """Takes the ranks and the (mean, variance) variables of every layer.

        `collect` is called first, to gather this rank's statistics where training has not left them
        (`PreciseStatistics`); `merge_parts` gives the virtual GPUs of this rank its merged
        statistics to continue from.
        """
        self._ranks = ranks
        self._statistics = list(statistics)
        self._collect = collect
        self._merge_parts = merge_parts
        self._graph = tf.function(self._merge, autograph=False)

    def synchronize(self) -> None:
        """Merges the statistics; every rank must call it."""
        if self._collect is not None:
            self._collect()
        self._merge_parts()
        if self._statistics and self._ranks.size > 1:
            self._graph()

    def _merge(self) -> None:
        means = tf.concat([tf.cast(mean.value, tf.float32) for mean, _ in self._statistics], axis=0)
        variances = tf.concat(
            [tf.cast(variance.value, tf.float32) for _, variance in self._statistics], axis=0
        )
        both = tf.stack([means, moments.second_moment(means, variances, tf)]) / self._ranks.size
        mean, square = tf.unstack(self._ranks.allreduce_sum(both, "batch_norm_statistics"))
        variance = moments.biased_variance(mean, square, tf)
        sizes = [int(m.shape[0]) for m, _ in self._statistics]
        merged = zip(tf.split(mean, sizes), tf.split(variance, sizes), strict=True)
        for (mean_variable, variance_variable), (new_mean, new_variance) in zip(
            self._statistics, merged, strict=True
        ):
            mean_variable.assign(new_mean)
            variance_variable.assign(new_variance)


class PreciseStatistics:
    """Replaces the running statistics by statistics of several batches under frozen weights.

    Each batch is run forward in training mode, which leaves its mean mu_j and biased variance
    var_j; kept are

        mu = mean_j(mu_j),   var = max(mean_j(var_j + mu_j^2) - mu^2, 0)

    as if the batches were one (Wu and Johnson, Rethinking "Batch" in BatchNorm, 2021, section 3).
    """

    def __init__(
        self,
        forward: Callable[[Mapping[str, tf.Tensor]], Any],
        statistics: Pairs,
        batches: Callable[[], Iterable[Mapping[str, tf.Tensor]]],
        state: RunState,
    ):
        """Takes (mean, variance) of every layer; `forward` runs a batch in training mode and
        updates nothing else.

        Nothing is run twice after the same step of `state`.
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
