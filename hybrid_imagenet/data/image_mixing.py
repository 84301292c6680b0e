"""Mixes each image of a batch with another one (MixUp and CutMix), inside the compiled step.

All random numbers of an image follow from its seed, so a resumed run mixes the same images with
the same shares. The partner of an image is the image before it in its GPU's micro-batch, and that
of the first is the last. So each image is the partner of one other. The order of images is random
already.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.data import device

# First of the draws of an image that decide how it is mixed. Augmentations and
# `training.batch_subsampler` use lower indices, so the random streams do not overlap.
_STREAM = 1 << 25
_CHOICE, _SHARE, _TOP, _LEFT = range(4)
_NUM_DRAWS = 4

# Intervals of the table of a Beta distribution, and of the integral from which it is computed.
_TABLE_INTERVALS = 4096
_INTEGRAL_INTERVALS = 1 << 16


class MixedLabels(NamedTuple):
    """The labels of mixed images.

    Attributes:
      own: Labels of the images, int64 [b].
      partner: Labels of their partners, int64 [b].
      share: Part of an image that is its own, in [0, 1]; the rest is its partner's. float32 [b].
    """

    own: tf.Tensor
    partner: tf.Tensor
    share: tf.Tensor

    def larger(self) -> tf.Tensor:
        """Returns the label with the larger share of each image, int64 [b]."""
        return tf.where(self.share >= 0.5, self.own, self.partner)


def mixup(images: tf.Tensor, partners: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Blends images with their partners.

    Args:
      images: float32 [b, s, s, 3].
      partners: Partner of each image, in the shape of `images`.
      share: Part of the image, in [0, 1], float32 [b].

    Reference:
      Zhang et al., mixup, arXiv 1710.09412; `keras.layers.MixUp`.
    """
    share = share[:, None, None, None]
    return share * images + (1.0 - share) * partners


def cutmix(images: tf.Tensor, partners: tf.Tensor, boxes: tf.Tensor) -> tf.Tensor:
    """Replaces a box of each image by the same box of its partner.

    Args:
      images: float32 [b, s, s, 3].
      partners: Partner of each image, in the shape of `images`.
      boxes: First row, first column, and the row and column after the last, float32 [b, 4].

    Reference:
      Yun et al., CutMix, arXiv 1905.04899; `keras.layers.CutMix`.
    """
    pixel = tf.range(images.shape[1], dtype=tf.float32)
    # `boxes[:, k, None]` would be wrong in a graph: TensorFlow 2's graph optimizer replaces a slice
    # of stacked tensors by one of them, and forgets the new axis.
    top, left, bottom, right = (edge[:, None] for edge in tf.unstack(boxes, axis=1))
    in_rows = (pixel >= top) & (pixel < bottom)
    in_columns = (pixel >= left) & (pixel < right)
    is_inside = in_rows[:, :, None] & in_columns[:, None, :]
    return tf.where(is_inside[..., None], partners, images)


def cutmix_share(boxes: tf.Tensor, side: int) -> tf.Tensor:
    """Returns the part of each image that is outside its box, float32 [b]."""
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return 1.0 - area / float(side * side)


def random_boxes(
    share: tf.Tensor, top_draw: tf.Tensor, left_draw: tf.Tensor, side: int
) -> tf.Tensor:
    """Returns squares of whole pixels at random places inside the image, for `cutmix`.

    As in Keras, all of a box is inside the image, so that areas have the intended distribution.
    Yun et al. cut off the part of a box that is outside.

    Args:
      share: Part of the image outside the box, float32 [b].
      top_draw: Uniform random numbers in [0, 1) for the rows, float32 [b].
      left_draw: The same for the columns.
      side: Side of the image, in pixels.
    """
    size = tf.round(float(side) * tf.sqrt(1.0 - share))
    top = tf.floor(top_draw * (side - size + 1.0))
    left = tf.floor(left_draw * (side - size + 1.0))
    return tf.stack([top, left, top + size, left + size], axis=1)


@functools.cache
def _beta_table(alpha: float) -> npt.NDArray[np.float32]:
    """Returns quantiles of Beta(alpha, alpha) at the probabilities from 0 to 1/2, evenly spaced.

    They are t = x^min(alpha, 1) instead of x, because t is a smooth function of the probability:
    with x = t^(1 / alpha) the density of t has no pole at 0.
    """
    exponent = min(alpha, 1.0)
    t = np.linspace(0.0, 0.5**exponent, _INTEGRAL_INTERVALS + 1)
    density = t ** (alpha / exponent - 1.0) * (1.0 - t ** (1.0 / exponent)) ** (alpha - 1.0)
    areas = (density[1:] + density[:-1]) / 2.0
    cumulative = np.concatenate([[0.0], np.cumsum(areas)])
    # The distribution is symmetric, so half of it is below 1/2.
    probability = 0.5 * cumulative / cumulative[-1]
    nodes = np.linspace(0.0, 0.5, _TABLE_INTERVALS + 1)
    return np.interp(nodes, probability, t).astype(np.float32)


def beta(uniform: tf.Tensor, alpha: float) -> tf.Tensor:
    """Turns uniform random numbers into those of a Beta(alpha, alpha) distribution.

    It is the inverse of the distribution function, by interpolation in a table. A rejection method
    would need an unknown number of draws.

    Args:
      uniform: float32 [b] in [0, 1).
      alpha: Positive; 1 is the uniform distribution, and smaller values prefer 0 and 1.

    Returns:
      float32 [b] in [0, 1].
    """
    table = tf.constant(_beta_table(alpha))
    position = tf.minimum(uniform, 1.0 - uniform) * (2.0 * _TABLE_INTERVALS)
    left = tf.minimum(tf.floor(position), _TABLE_INTERVALS - 1.0)
    low = tf.gather(table, tf.cast(left, tf.int32))
    high = tf.gather(table, tf.cast(left + 1.0, tf.int32))
    t = low + (position - left) * (high - low)
    quantile = t ** (1.0 / min(alpha, 1.0))
    return tf.where(uniform < 0.5, quantile, 1.0 - quantile)


@dataclasses.dataclass(frozen=True)
class ImageMixer:
    """Mixes the images and labels of a rank's micro-batch.

    With both methods each image is mixed by one of them, each with probability 1/2.

    Attributes:
      mixup_alpha: Shares of MixUp are distributed as Beta(alpha, alpha); 0 for no MixUp.
      cutmix_alpha: The same for CutMix.
      parts: GPUs that the batch stands for, one after the other. No image is mixed with one of
        another GPU.
    """

    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    parts: int = 1

    def images(self, images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
        """Mixes images.

        Args:
          images: float32 [b, s, s, 3].
          seeds: int64 [b, 2].
        """
        draws = device.uniforms(seeds, _NUM_DRAWS, _STREAM)
        partners = self._partners(images)
        if not self.cutmix_alpha:
            return mixup(images, partners, beta(draws[:, _SHARE], self.mixup_alpha))
        cut = cutmix(images, partners, self._boxes(draws, images.shape[1]))
        if not self.mixup_alpha:
            return cut
        blended = mixup(images, partners, beta(draws[:, _SHARE], self.mixup_alpha))
        return tf.where(self._is_cut(draws)[:, None, None, None], cut, blended)

    def labels(self, labels: tf.Tensor, seeds: tf.Tensor, side: int) -> MixedLabels:
        """Returns the labels of the images that `images` returns.

        Args:
          labels: int64 [b].
          seeds: int64 [b, 2].
          side: Side of the images that were mixed, in pixels.
        """
        draws = device.uniforms(seeds, _NUM_DRAWS, _STREAM)
        partners = self._partners(labels)
        if not self.cutmix_alpha:
            return MixedLabels(labels, partners, beta(draws[:, _SHARE], self.mixup_alpha))
        share = cutmix_share(self._boxes(draws, side), side)
        if self.mixup_alpha:
            blended_share = beta(draws[:, _SHARE], self.mixup_alpha)
            share = tf.where(self._is_cut(draws), share, blended_share)
        return MixedLabels(labels, partners, share)

    def _boxes(self, draws: tf.Tensor, side: int) -> tf.Tensor:
        share = beta(draws[:, _SHARE], self.cutmix_alpha)
        return random_boxes(share, draws[:, _TOP], draws[:, _LEFT], side)

    def _is_cut(self, draws: tf.Tensor) -> tf.Tensor:
        return draws[:, _CHOICE] < 0.5

    def _partners(self, values: tf.Tensor) -> tf.Tensor:
        """Returns for each entry the one before it in its part."""
        size = values.shape[0] // self.parts
        pieces = []
        for part in range(self.parts):
            part_values = values[part * size : (part + 1) * size]
            pieces += [part_values[-1:], part_values[:-1]]
        return tf.concat(pieces, axis=0)
