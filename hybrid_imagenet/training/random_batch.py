"""Omits some images of each GPU's batch, a number drawn at every step (Lu et al., Table 3.4, first
row).
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from hybrid_imagenet.data import device
from hybrid_imagenet.training.step import Batch

_STREAM = 1 << 24
"""Of an image's draws: beyond those of every augmentation."""


class RandomBatch:
    """Draws how many images each GPU uses, evenly from `least` to its batch.

    The draw of a GPU follows from the seed of its first image, so that it depends neither on how
    GPUs are spread over ranks nor on where a run was resumed.
    """

    def __init__(
        self, least: int, parts: int, ranks: int, allreduce: Callable[[tf.Tensor, str], tf.Tensor]
    ):
        """Takes what is the same at every step.

        Args:
          least: images of a GPU that are always used, at least 1.
          parts: GPUs that a rank's batch stands for, one after the other.
          ranks: their number.
          allreduce: `(tensor, name) -> sum over ranks`.
        """
        self._least, self._parts, self._ranks, self._allreduce = least, parts, ranks, allreduce

    def counts(self, seeds: tf.Tensor) -> tf.Tensor:
        """Returns the images that each GPU uses, int32 [parts], for the seeds of all, int64 [parts
        * b, 2].
        """
        size = seeds.shape[0] // self._parts
        draws = device.uniforms(seeds[::size], 1, start=_STREAM)[:, 0]
        more = tf.cast(tf.floor(draws * float(size - self._least + 1)), tf.int32)
        return self._least + more

    def __call__(self, batch: Batch) -> tuple[Batch, tf.Tensor]:
        """Returns the images that are used, and the weight of this rank's mean among those of all
        ranks.

        Args:
          batch: tensors of [parts * b, ...], with "seed".

        Returns:
          The batch with the first images of each GPU, and a float32 scalar: this rank's images over
          the mean of all ranks'. The mean over ranks of weighted means is that over all images.
        """
        counts = self.counts(batch["seed"])
        size = batch["seed"].shape[0] // self._parts
        used = tf.range(size)[None, :] < counts[:, None]
        places = tf.where(tf.reshape(used, [-1]))[:, 0]
        own = tf.cast(tf.reduce_sum(counts), tf.float32)
        weight = own * float(self._ranks) / self._allreduce(own, "random_batch")
        return {name: tf.gather(values, places) for name, values in batch.items()}, weight
