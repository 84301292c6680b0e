"""Mixes training images on the device (Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018)."""

from __future__ import annotations

import tensorflow as tf


def mix(images: tf.Tensor, seeds: tf.Tensor, alpha: float, parts: int = 1) -> tuple[tf.Tensor, tf.Tensor]:
    """Mixes each image of a batch with the one at the mirrored place.

        x'_i = lam x_i + (1 - lam) x_{b-1-i},   lam ~ Beta(alpha, alpha), one draw per batch

    Args:
      images: [b, h, w, c], floating-point.
      seeds: int64 [b, 2], the seeds of the images; the first image's decide the draw.
      alpha: positive.
      parts: equal parts of the batch, each of which is a batch of its own in this sense.

    Returns:
      The mixed images, and lam of each, float32 [b]. The loss is lam loss(y_i) + (1 - lam) loss(y_{b-1-i}), where
      `mirrored` gives the latter labels.
    """
    size = tf.shape(images)[0] // parts
    shares = tf.repeat(tf.stack([_share(seeds[part * size], alpha) for part in range(parts)]), size)
    weight = tf.cast(shares, images.dtype)[:, None, None, None]
    return weight * images + (1 - weight) * mirrored(images, parts), shares


def mirrored(values: tf.Tensor, parts: int = 1) -> tf.Tensor:
    """The values, [b, ...], of each part in the opposite order."""
    split = tf.reshape(values, tf.concat([[parts, -1], tf.shape(values)[1:]], 0))
    return tf.reshape(split[:, ::-1], tf.shape(values))


def _share(seed: tf.Tensor, alpha: float) -> tf.Tensor:
    """A beta variate, float32 scalar: a ratio of two gamma variates with the same scale."""
    # The seed is random already. TensorFlow's own way from a seed to key and counter leads through the host.
    words = tf.bitcast(seed, tf.uint64)
    gammas = tf.raw_ops.StatelessRandomGammaV3(
        shape=[2],
        key=words[:1],
        counter=tf.stack([tf.zeros([], tf.uint64), words[1]]),
        alg=1,
        alpha=tf.fill([2], alpha),
    )
    return gammas[0] / tf.maximum(gammas[0] + gammas[1], 1e-30)
