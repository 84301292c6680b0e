"""Mixes training images on the device (Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018)."""

from __future__ import annotations

import tensorflow as tf


def mix(images: tf.Tensor, seeds: tf.Tensor, alpha: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Mixes each image of a batch with the one at the mirrored place.

        x'_i = lam x_i + (1 - lam) x_{b-1-i},   lam ~ Beta(alpha, alpha), one draw per batch

    Args:
      images: [b, h, w, c], floating-point.
      seeds: int64 [b, 2], the seeds of the images; the first image's decide the draw.
      alpha: positive.

    Returns:
      The mixed images, and lam as a float32 scalar. The loss is lam loss(y_i) + (1 - lam) loss(y_{b-1-i}).
    """
    # A ratio of two gamma variates with the same scale is a beta variate.
    gammas = tf.random.stateless_gamma([2], seeds[0], alpha=tf.fill([2], tf.constant(alpha, tf.float32)))
    share = gammas[0] / tf.maximum(gammas[0] + gammas[1], 1e-30)
    weight = tf.cast(share, images.dtype)
    return weight * images + (1 - weight) * tf.reverse(images, [0]), share
