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


class NumericsGuard:
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
        self._optimizer = optimizer
        self._limit = max_skipped_steps
        self._value = lambda name: float(read(name)[0])

    def check(self, step: int, train_loss: float) -> dict[str, float]:
        """Returns the values of a step whose metrics were fetched, for its record.

        Raises:
          NumericsError: if the limit is reached.
        """
        values, in_a_row = self.values(), int(self._value("skipped_in_a_row"))
        if in_a_row >= self._limit:
            layers = self._optimizer.non_finite()
            more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
            raise NumericsError(
                f"step {step}: the last {in_a_row} steps had non-finite gradients (loss {train_loss:.4g}, "
                f"loss scale {values['loss_scale']:g}; in {', '.join(layers[-_NAMED:]) or 'none of this step'}{more}, "
                "last layer last); the newest checkpoint is still good: lower --lr, lengthen "
                "--warmup_epochs or use --precision=float32, and start again with --resume"
            )
        return values

    def values(self) -> dict[str, float]:
        """Returns loss scale, skipped steps and gradient norm as they are now."""
        return {
            "loss_scale": self._value("loss_scale"),
            "skipped_steps": int(self._value("skipped_steps")),
            "grad_norm": self._value("grad_norm"),
        }


class WeightCheck:
    """Compares a checksum of all weights over ranks after every epoch, and names the ranks that differ."""

    def __init__(self, allgather: Callable[[Any], list[Any]], variables: Sequence[keras.Variable]):
        """`allgather` collects one small object per rank, in the order of ranks."""
        self._allgather = allgather
        self._checksum = tf.function(lambda: checksum(variables), autograph=False)

    def __call__(self, epoch: int) -> dict[str, Any]:
        """Compares the checksums; adds nothing to the record.

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
        return {}


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


class TrustRatios:
    """Gives `trust_ratios`, the LARS ratio of each layer in the last step, in epochs in which LARS runs."""

    def __init__(self, optimizer: GroupedOptimizer, variables: Sequence[keras.Variable]):
        """Takes the `variables` that the optimizer was built on."""
        self._optimizer = optimizer
        self._names = [variables[i].path for i in optimizer.kernel_indices()]

    def __call__(self, epoch: int) -> dict[str, Any]:
        """Fetches the ratios; none before LARS runs."""
        if not (self._optimizer.scales_layers and self._optimizer.hyper["phase"] > 0):
            return {}
        return {"trust_ratios": dict(zip(self._names, self._optimizer.trust_ratios.numpy().tolist(), strict=True))}


class NoiseScale:
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
        self._optimizer = optimizer
        self._allgather = allgather
        self._batch_sizes = batch_sizes
        self._message = message

    def __call__(self, epoch: int) -> dict[str, Any]:
        """Gives `noise_scale` (images); every rank calls it."""
        own = self._optimizer.square_norms.numpy().tolist()
        self._optimizer.square_norms.assign(tf.zeros([3], tf.float64))
        rows = self._allgather(own)
        ranks = len(rows)
        small, big, steps = (sum(column) for column in zip(*rows, strict=True))
        if not steps or ranks == 1:
            return {}
        images, micro_batches = self._batch_sizes(epoch)
        batch = images * micro_batches
        scale = noise_scale.NoiseScale(decay=0.0)
        scale.add(small / steps, big / steps, batch, batch * ranks)
        self._message(f"epoch {epoch + 1}: {noise_scale.advice(scale.value, batch * ranks)}")
        return {"noise_scale": scale.value}
