"""Sums loss and correct predictions on the device, and over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from hybrid_imagenet import xla
from hybrid_imagenet.data.image_mixing import MixedLabels


@dataclasses.dataclass(frozen=True)
class ClassificationSums:
    """Holds sums over examples.

    Attributes:
      loss: Sum of the losses, in nats.
      top1: Examples whose most probable class is the right one.
      top5: Examples whose right class is among the five most probable ones.
      count: Number of examples.
    """

    loss: float
    top1: float
    top5: float
    count: float

    def means(self, prefix: str) -> dict[str, float]:
        """Returns the means `<prefix>_loss`, `<prefix>_top1` and `<prefix>_top5`.

        Accuracies are fractions. Without examples the means are NaN.
        """
        count = self.count or float("nan")
        return {
            f"{prefix}_loss": self.loss / count,
            f"{prefix}_top1": self.top1 / count,
            f"{prefix}_top5": self.top5 / count,
        }

    def __sub__(self, other: ClassificationSums) -> ClassificationSums:
        """Returns the sums of the examples that were added after `other` was read."""
        return ClassificationSums(
            self.loss - other.loss,
            self.top1 - other.top1,
            self.top5 - other.top5,
            self.count - other.count,
        )

    @classmethod
    def from_vector(cls, vector: tf.Tensor) -> ClassificationSums:
        """Returns the sums in a float64 [4] tensor, such as `SumAccumulator.variable`."""
        return cls(*vector.numpy().tolist())


class SumAccumulator:
    """Keeps the four sums of `ClassificationSums` on the device, as a float64 vector.

    float64 counts all examples of ImageNet exactly; float32 would not.
    """

    def __init__(self, name: str):
        self.variable = tf.Variable(tf.zeros([4], tf.float64), trainable=False, name=name)
        self._sum_batch = xla.compile_on_gpu(_batch_sums)

    def add(
        self,
        losses: tf.Tensor,
        logits: tf.Tensor,
        labels: tf.Tensor | MixedLabels,
        weights: tf.Tensor | None = None,
    ) -> None:
        """Adds a batch.

        Args:
          losses: Losses of the examples, float32 [b].
          logits: float32 [b, classes].
          labels: int64 [b]. Of mixed labels, the one with the larger share is the right one, as in
            torchvision.
          weights: float32 [b]; examples of weight 0, which are padding, are not added. None adds
            all.
        """
        self.variable.assign_add(self._sum_batch(losses, logits, labels, weights))

    def reset(self) -> None:
        """Sets the sums to zero."""
        self.variable.assign(tf.zeros([4], tf.float64))

    def restore(self, sums: ClassificationSums) -> None:
        """Sets the sums, for example to those of an epoch that a restart has interrupted."""
        self.variable.assign(dataclasses.astuple(sums))

    def read(self) -> ClassificationSums:
        """Fetches the sums to the host."""
        return ClassificationSums.from_vector(self.variable)


def _batch_sums(
    losses: tf.Tensor,
    logits: tf.Tensor,
    labels: tf.Tensor | MixedLabels,
    weights: tf.Tensor | None,
) -> tf.Tensor:
    """Returns the sums over a batch, float64 [4]; arguments as for `SumAccumulator.add`."""
    if isinstance(labels, MixedLabels):
        labels = labels.larger()
    predicted = tf.argmax(logits, axis=-1, output_type=labels.dtype)
    top1 = tf.cast(tf.equal(predicted, labels), tf.float64)
    # With five classes or fewer, every example counts.
    num_guesses = min(5, logits.shape[-1])
    top5 = tf.cast(tf.math.in_top_k(labels, logits, num_guesses), tf.float64)
    columns = [tf.cast(losses, tf.float64), top1, top5, tf.ones_like(top1)]
    if weights is not None:
        is_example = weights > 0
        columns = [tf.where(is_example, column, tf.zeros_like(column)) for column in columns]
    return tf.stack([tf.reduce_sum(column) for column in columns])


def sum_over_ranks(
    sums: ClassificationSums, allreduce_sum: Callable[[tf.Tensor, str], tf.Tensor]
) -> ClassificationSums:
    """Returns the sums over the examples of all ranks, in float64; every rank calls it.

    Args:
      sums: Sums of this rank.
      allreduce_sum: `(tensor, name) -> sum over ranks`.
    """
    vector = tf.constant(dataclasses.astuple(sums), tf.float64)
    return ClassificationSums.from_vector(allreduce_sum(vector, "train_sums"))


def epoch_sums_of_rank(
    epoch_sums: Sequence[Sequence[float]], rank: int, size: int
) -> ClassificationSums:
    """Returns the sums with which a rank continues an epoch that a restart has interrupted.

    With as many ranks as before, each continues with its own sums, so that numbers are added in the
    same order. Otherwise rank 0 continues with the total and the others with 0.

    Args:
      epoch_sums: Epoch sums of the ranks before the restart.
      rank: Rank of this process.
      size: Number of ranks.
    """
    if len(epoch_sums) == size:
        return ClassificationSums(*epoch_sums[rank])
    if rank:
        return ClassificationSums(0.0, 0.0, 0.0, 0.0)
    totals = [sum(column) for column in zip(*epoch_sums, strict=True)]
    return ClassificationSums(*totals)
