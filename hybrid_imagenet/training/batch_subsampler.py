"""Selects the images of each GPU's batch that a step uses, after drawing their number.

Reference:
  Lu et al., Table 3.4, first row.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from hybrid_imagenet.data import device
from hybrid_imagenet.training.step import Batch

# Draw of an image that decides. Augmentations use lower indices, so the random streams do not
# overlap.
_DRAW_NUMBER = 1 << 24


class BatchSubsampler:
    """Draws how many images each GPU uses, uniformly from `min_images` to its whole batch.

    The draw of a GPU follows from the seed of its first image. So it depends neither on how GPUs
    are spread over ranks nor on the step at which a run was resumed.
    """

    def __init__(
        self,
        min_images: int,
        virtual_gpus: int,
        num_ranks: int,
        allreduce: Callable[[tf.Tensor, str], tf.Tensor],
    ):
        """Sets what is the same at every step.

        Args:
          min_images: Images of a GPU that are always used, at least 1.
          virtual_gpus: GPUs whose batches follow one another in the batch of a rank.
          num_ranks: Number of ranks.
          allreduce: `(tensor, name) -> sum over ranks`.
        """
        self._min_images = min_images
        self._virtual_gpus = virtual_gpus
        self._num_ranks = num_ranks
        self._allreduce = allreduce

    def __call__(self, batch: Batch) -> tuple[Batch, tf.Tensor]:
        """Returns the images that are used, and the weight of this rank's mean loss.

        Args:
          batch: Tensors of [virtual_gpus * b, ...], with "seed".

        Returns:
          The batch with the first images of each GPU; and a float32 scalar, this rank's number of
          images divided by the mean number over ranks. With it the mean over ranks of weighted
          means is the mean over all images.
        """
        counts = self.draw_counts(batch["seed"])
        gpu_batch = batch["seed"].shape[0] // self._virtual_gpus
        is_used = tf.range(gpu_batch)[None, :] < counts[:, None]
        indices = tf.where(tf.reshape(is_used, [-1]))[:, 0]
        num_images = tf.cast(tf.reduce_sum(counts), tf.float32)
        scaled = num_images * float(self._num_ranks)
        weight = scaled / self._allreduce(num_images, "random_batch")
        return {name: tf.gather(values, indices) for name, values in batch.items()}, weight

    def draw_counts(self, seeds: tf.Tensor) -> tf.Tensor:
        """Returns how many images each GPU uses, int32 [virtual_gpus].

        Args:
          seeds: Seeds of all images, int64 [virtual_gpus * b, 2].
        """
        gpu_batch = seeds.shape[0] // self._virtual_gpus
        draws = device.uniforms(seeds[::gpu_batch], 1, start=_DRAW_NUMBER)[:, 0]
        num_choices = gpu_batch - self._min_images + 1
        return self._min_images + tf.cast(tf.floor(draws * float(num_choices)), tf.int32)
