"""Keeps sums of loss and correct predictions on the device and adds them over ranks exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from hybrid_imagenet import xla
from hybrid_imagenet.data.image_mixing import MixedLabels


@dataclasses.dataclass(frozen=True)
class ClassificationSums:
    """Holds sums over examples: loss (nats), correct first guesses, correct among five guesses, and
    their number.
    """

    loss: float
    top1: float
    top5: float
    count: float

    def means(self, prefix: str) -> dict[str, float]:
        """Returns averages named `<prefix>_loss`, `<prefix>_top1`, `<prefix>_top5` (fractions); NaN
        if empty.
        """
        count = self.count or float("nan")
        return {
            f"{prefix}_loss": self.loss / count,
            f"{prefix}_top1": self.top1 / count,
            f"{prefix}_top5": self.top5 / count,
        }

    def __sub__(self, other: ClassificationSums) -> ClassificationSums:
        """Returns the sums of the examples that came after the ones in `other`."""
        return ClassificationSums(
            self.loss - other.loss,
            self.top1 - other.top1,
            self.top5 - other.top5,
            self.count - other.count,
        )


class SumAccumulator:
    """Keeps one float64 vector of four sums on the device; float64 counts every example of ImageNet
    exactly.
    """

    def __init__(self, name: str):
        self.variable = tf.Variable(tf.zeros([4], tf.float64), trainable=False, name=name)
        self._of_batch = xla.compile_on_gpu(_batch_sums)

    def add(
        self,
        losses: tf.Tensor,
        logits: tf.Tensor,
        labels: tf.Tensor | MixedLabels,
        weights: tf.Tensor | None = None,
    ) -> None:
        """Adds a batch.

        Args:
          losses: float32 [b], per example.
          logits: float32 [b, classes].
          labels: int64 [b]. Of mixed labels that with the larger share is the right one, as in
            torchvision.
          weights: float32 [b] or None: 0 leaves an example (padding) out.
        """
        self.variable.assign_add(self._of_batch(losses, logits, labels, weights))

    def reset(self) -> None:
        """Sets the sums to zero."""
        self.variable.assign(tf.zeros([4], tf.float64))

    def restore(self, sums: ClassificationSums) -> None:
        """Sets the sums, for example the sums of an epoch's part before a restart."""
        self.variable.assign(dataclasses.astuple(sums))

    def read(self) -> ClassificationSums:
        """Fetches the sums to the host."""
        return ClassificationSums(*self.variable.numpy().tolist())


def _batch_sums(
    losses: tf.Tensor,
    logits: tf.Tensor,
    labels: tf.Tensor | MixedLabels,
    weights: tf.Tensor | None,
) -> tf.Tensor:
    """The sums over a batch, float64 [4]; arguments as for `SumAccumulator.add`."""
    if isinstance(labels, MixedLabels):
        labels = labels.larger()
    # Two classes have no fifth guess: in_top_k then counts every example.
    top1 = tf.cast(
        tf.equal(tf.argmax(logits, axis=-1, output_type=labels.dtype), labels), tf.float64
    )
    top5 = tf.cast(tf.math.in_top_k(labels, logits, min(5, logits.shape[-1])), tf.float64)
    columns = [tf.cast(losses, tf.float64), top1, top5, tf.ones_like(top1)]
    if weights is not None:
        keep = weights > 0
        columns = [tf.where(keep, column, tf.zeros_like(column)) for column in columns]
    return tf.stack([tf.reduce_sum(column) for column in columns])


def from_vector(vector: tf.Tensor) -> ClassificationSums:
    """Returns the sums in a float64 [4] tensor, such as an all-reduced
    `SumAccumulator.variable`.
    """
    return ClassificationSums(*vector.numpy().tolist())


def over_ranks(
    own: ClassificationSums, allreduce_sum: Callable[[tf.Tensor, str], tf.Tensor]
) -> ClassificationSums:
    """Returns the sums over the examples of all ranks, in float64; every rank calls it."""
    return from_vector(
        allreduce_sum(tf.constant(dataclasses.astuple(own), tf.float64), "train_sums")
    )


def restore_sums(epoch_sums: Sequence[Sequence[float]], rank: int, size: int) -> ClassificationSums:
    """Returns this rank's share of the sums of an epoch under way.

    With as many ranks as before each gets its own back, so that additions continue in the same
    order; otherwise rank 0 gets the total.
    """
    if len(epoch_sums) == size:
        return ClassificationSums(*epoch_sums[rank])
    if rank:
        return ClassificationSums(0.0, 0.0, 0.0, 0.0)
    return ClassificationSums(*(sum(column) for column in zip(*epoch_sums, strict=True)))
