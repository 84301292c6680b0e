"""Stops after too many skipped steps, checks that weights are equal on all ranks, and records numeric health."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.errors import NumericsError
from hybrid_imagenet.numerics import noise_scale
from hybrid_imagenet.optimizers.base import GroupedOptimizer
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer

_NAMED = 8  # of the layers with non-finite gradients; backpropagation meets the last ones first


class NumericsGuard(keras.callbacks.Callback):
    """Adds loss scale, skipped steps and gradient norm to the records; stops a run that only skips.

    The verdict on each step is the same on every rank, and all ranks look at the same steps, so all stop together.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        max_skipped_steps: int,
        read: Callable[[str], npt.NDArray[np.float64]],
    ):
        """Stops after `max_skipped_steps` skipped steps in a row; `read` is `late_copies.LateCopies.read`."""
        super().__init__()
        self._optimizer = optimizer
        self._limit = max_skipped_steps
        self._value = lambda name: float(read(name)[0])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads the counters at a step whose metrics are fetched.

        Raises:
          NumericsError: if the limit is reached.
        """
        if not logs or "train_loss" not in logs:
            return
        self._read(logs)
        in_a_row = int(self._value("skipped_in_a_row"))
        if in_a_row >= self._limit:
            layers = self._optimizer.non_finite()
            more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
            raise NumericsError(
                f"step {batch}: the last {in_a_row} steps had non-finite gradients (loss {logs['train_loss']:.4g}, "
                f"loss scale {logs['loss_scale']:g}; in {', '.join(layers[-_NAMED:]) or 'none of this step'}{more}, "
                "last layer last); the newest checkpoint is still good: lower --lr, lengthen "
                "--warmup_epochs or use --precision=float32, and start again with --resume"
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            self._read(logs)

    def _read(self, logs: dict[str, Any]) -> None:
        logs["loss_scale"] = self._value("loss_scale")
        logs["skipped_steps"] = int(self._value("skipped_steps"))
        logs["grad_norm"] = self._value("grad_norm")


class WeightCheck(keras.callbacks.Callback):
    """Compares a checksum of all weights over ranks after every epoch, and names the ranks that differ."""

    def __init__(self, allgather: Callable[[Any], list[Any]], variables: Sequence[keras.Variable]):
        """`allgather` collects one small object per rank, in the order of ranks."""
        super().__init__()
        self._allgather = allgather
        self._checksum = tf.function(lambda: checksum(variables), autograph=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares the checksums.

        Raises:
          NumericsError: on every rank, if the weights are not the same everywhere.
        """
        sums = self._allgather(int(self._checksum().numpy()))
        differing = [rank for rank, value in enumerate(sums) if value != max(sums, key=sums.count)]
        if differing:
            raise NumericsError(
                f"epoch {epoch + 1}: the weights of rank {', '.join(map(str, differing))} differ from those of the "
                "other ranks; check that host's memory and drivers, and start again with --resume"
            )


def checksum(variables: Sequence[keras.Variable]) -> tf.Tensor:
    """Returns the sum of variables' bit patterns modulo 2^64, int64, which does not depend on the order of addition.

    Args:
      variables: of any numeric type; each variable counts with a factor of its own.
    """
    bits = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}
    total = tf.constant(0, tf.int64)
    for i, value in enumerate(v.value for v in variables):
        pattern = tf.cast(value, tf.int8) if value.dtype.is_bool else tf.bitcast(value, bits[value.dtype.size])
        total += (2 * i + 1) * tf.reduce_sum(tf.cast(pattern, tf.int64))
    return total


class TrustRatioLog(keras.callbacks.Callback):
    """Adds `trust_ratios`, the LARS ratio of each layer in the last step, to epochs in which LARS runs."""

    def __init__(self, optimizer: GroupedOptimizer, variables: Sequence[keras.Variable]):
        """Takes the `variables` that the optimizer was built on."""
        super().__init__()
        self._optimizer = optimizer
        self._names = [variables[i].path for i in optimizer.kernel_indices()]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None and self._optimizer.scales_layers and self._optimizer.hyper["phase"] > 0:
            logs["trust_ratios"] = dict(zip(self._names, self._optimizer.trust_ratios.numpy().tolist(), strict=True))


class NoiseScaleLog(keras.callbacks.Callback):
    """Estimates the gradient noise scale from each epoch's square norms and says whether a larger batch would pay.

    The square norms of all ranks' gradients and of their mean are averaged over ranks and steps before the estimate
    (McCandlish et al., appendix A.1); b is a rank's batch and B the global one.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        allgather: Callable[[Any], list[Any]],
        batch_sizes: Callable[[int], tuple[int, int]],
        message: Callable[[str], None],
    ):
        """`batch_sizes(epoch)` gives images per rank and micro-batch, and micro-batches per step."""
        super().__init__()
        self._optimizer = optimizer
        self._allgather = allgather
        self._batch_sizes = batch_sizes
        self._message = message

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `noise_scale` (images) to the record; every rank calls it."""
        own = self._optimizer.square_norms.numpy().tolist()
        self._optimizer.square_norms.assign(tf.zeros([3], tf.float64))
        rows = self._allgather(own)
        ranks = len(rows)
        small, big, steps = (sum(column) for column in zip(*rows, strict=True))
        if not steps or ranks == 1 or logs is None:
            return
        images, micro_batches = self._batch_sizes(epoch)
        batch = images * micro_batches
        scale = noise_scale.NoiseScale(decay=0.0)
        scale.add(small / steps, big / steps, batch, batch * ranks)
        logs["noise_scale"] = scale.value
        self._message(f"epoch {epoch + 1}: {noise_scale.advice(scale.value, batch * ranks)}")
