"""Batch normalization of equal parts of a batch, each by its own statistics, as several GPUs would do it."""

from __future__ import annotations

import tensorflow as tf


def normalize_parts(
    inputs: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float, parts: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalizes [parts * b, h, w, c] part by part; the parts are contiguous.

    Mean and variance are FP32, the variance from the differences to the mean. Forward and backward pass are compiled by
    XLA, which makes each a few loops over memory whatever the number of parts.

    Args:
      inputs: activations in any float type; a multiple of `parts` images.
      scale: FP32 [c].
      offset: FP32 [c].
      epsilon: added to the variance.
      parts: how many.

    Returns:
      Outputs in the type of the inputs, means and biased variances (FP32 [parts, c]).
    """
    shape = tf.shape(inputs)
    channels = inputs.shape[-1]

    @tf.custom_gradient
    def normalize(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tuple:
        flat = tf.reshape(x, [parts, -1, channels])
        outputs, mean, variance = _forward(flat, gamma, beta, epsilon)

        def gradient(d_outputs: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            dy = tf.reshape(d_outputs, [parts, -1, channels])
            dx, d_gamma, d_beta = _backward(flat, dy, gamma, mean, variance, epsilon)
            return tf.reshape(dx, shape), d_gamma, d_beta

        return (tf.reshape(outputs, shape), mean[:, 0], variance[:, 0]), gradient

    return normalize(inputs, scale, offset)


@tf.function(jit_compile=True, autograph=False)
def _forward(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Outputs [parts, n, c], means and variances [parts, 1, c]."""
    wide = tf.cast(x, tf.float32)
    mean = tf.reduce_mean(wide, 1, keepdims=True)
    variance = tf.reduce_mean(tf.square(wide - mean), 1, keepdims=True)
    outputs = (wide - mean) * (tf.math.rsqrt(variance + epsilon) * gamma) + beta
    return tf.cast(outputs, x.dtype), mean, variance


@tf.function(jit_compile=True, autograph=False)
def _backward(
    x: tf.Tensor, dy: tf.Tensor, gamma: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Gradients of the input [parts, n, c] and, summed over parts, of scale and offset [c]."""
    wide = tf.cast(dy, tf.float32)
    inverse = tf.math.rsqrt(variance + epsilon)
    normal = (tf.cast(x, tf.float32) - mean) * inverse
    dy_mean = tf.reduce_mean(wide, 1, keepdims=True)
    product_mean = tf.reduce_mean(wide * normal, 1, keepdims=True)
    dx = (inverse * gamma) * (wide - dy_mean - normal * product_mean)
    count = tf.cast(tf.shape(x)[1], tf.float32)
    d_gamma = tf.reduce_sum(product_mean, [0, 1]) * count
    return tf.cast(dx, x.dtype), d_gamma, tf.reduce_sum(dy_mean, [0, 1]) * count
