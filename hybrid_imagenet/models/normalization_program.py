"""Normalizes a batch, adds a shortcut and applies ReLU as one XLA program.

In FP16 cuDNN computes all three in one kernel. TensorFlow has no such kernel for BF16, where it
reads and writes the activations once more for each of the three: 33 GB per step of ResNet-50 with
256 images. The program reads and writes them as often as cuDNN's kernel, in any float type. By
these bytes BF16 should reach 5,300 to 5,700 images/s on an H100 instead of 3,912; it has not been
timed on a GPU yet.
"""

from __future__ import annotations

import tensorflow as tf

from hybrid_imagenet import xla

_BATCH_AND_PIXELS = [0, 1, 2]


def normalize_relu(
    inputs: tf.Tensor,
    shortcut: tf.Tensor | None,
    scale: tf.Tensor,
    offset: tf.Tensor,
    epsilon: float,
) -> tf.Tensor:
    """Normalizes by the batch's statistics, adds the shortcut, if there is one, and applies ReLU.

    Args:
      inputs: activations [b, h, w, c] in any float type, of static shape.
      shortcut: in the shape and type of the inputs, or None.
      scale: FP32 [c].
      offset: FP32 [c].
      epsilon: added to the variance.

    Returns:
      Outputs in shape and type of the inputs, mean and biased variance (FP32 [c]).
    """
    shape = inputs.shape

    @tf.custom_gradient
    def normalize(x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, *added: tf.Tensor) -> tuple:
        outputs, mean, variance = _forward(x, gamma, beta, epsilon, *added)
        # The graph optimizer does not know the shape of a compiled program's result.
        outputs = tf.reshape(outputs, shape)

        def gradient(d_outputs: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, ...]:
            if not added:
                dx, d_gamma, d_beta = _backward(d_outputs, x, gamma, beta, mean, variance, epsilon)
                return tf.reshape(dx, shape), d_gamma, d_beta
            dx, d_gamma, d_beta, d_added = _backward_with_shortcut(
                d_outputs, outputs, x, gamma, mean, variance, epsilon
            )
            return tf.reshape(dx, shape), d_gamma, d_beta, tf.reshape(d_added, shape)

        return (outputs, mean, variance), gradient

    return normalize(inputs, scale, offset, *([] if shortcut is None else [shortcut]))


def batch_statistics(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and biased variance of each channel, FP32 [c], from one pass over x.

    The variance is E[x^2] - E[x]^2. Its relative error is about 1e-7 (1 + mean^2 / variance).
    """
    x_fp32 = tf.cast(x, tf.float32)
    mean = tf.reduce_mean(x_fp32, _BATCH_AND_PIXELS)
    mean_square = tf.reduce_mean(tf.square(x_fp32), _BATCH_AND_PIXELS)
    return mean, tf.maximum(mean_square - tf.square(mean), 0.0)


def scale_and_shift(
    x: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    epsilon: float,
) -> tf.Tensor:
    """Returns the normalized values of x, scaled and shifted, in FP32."""
    factor = tf.math.rsqrt(variance + epsilon) * gamma
    return (tf.cast(x, tf.float32) - mean) * factor + beta


@xla.compile_on_gpu
def _forward(
    x: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float, *added: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns outputs, mean and variance."""
    mean, variance = batch_statistics(x)
    sums = scale_and_shift(x, mean, variance, gamma, beta, epsilon)
    for shortcut in added:
        sums += tf.cast(shortcut, tf.float32)
    return tf.cast(tf.nn.relu(sums), x.dtype), mean, variance


@xla.compile_on_gpu
def _backward(
    d_outputs: tf.Tensor,
    x: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the gradients of inputs, scale and offset.

    The sign of the outputs is computed from the inputs, which must be read anyway.
    """
    is_positive = scale_and_shift(x, mean, variance, gamma, beta, epsilon) > 0
    dy = tf.where(is_positive, tf.cast(d_outputs, tf.float32), 0.0)
    return _gradients(dy, x, gamma, mean, variance, epsilon)


@xla.compile_on_gpu
def _backward_with_shortcut(
    d_outputs: tf.Tensor,
    outputs: tf.Tensor,
    x: tf.Tensor,
    gamma: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the gradients of inputs, scale, offset and shortcut.

    That of the shortcut is in the type of the inputs before it is used for the others, so XLA
    writes it once and does not keep the signs of the outputs.
    """
    d_shortcut = tf.where(outputs > 0, d_outputs, tf.zeros_like(d_outputs))
    dy = tf.cast(d_shortcut, tf.float32)
    return *_gradients(dy, x, gamma, mean, variance, epsilon), d_shortcut


def _gradients(
    dy: tf.Tensor,
    x: tf.Tensor,
    gamma: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the gradients of inputs, scale and offset from that of the normalized values."""
    inverse_stddev = tf.math.rsqrt(variance + epsilon)
    xhat = (tf.cast(x, tf.float32) - mean) * inverse_stddev
    count = float(x.shape.num_elements() // x.shape[-1])
    d_beta = tf.reduce_sum(dy, _BATCH_AND_PIXELS)
    d_gamma = tf.reduce_sum(dy * xhat, _BATCH_AND_PIXELS)
    dx = input_gradient(dy, xhat, inverse_stddev * gamma, d_beta / count, d_gamma / count)
    return tf.cast(dx, x.dtype), d_gamma, d_beta


def input_gradient(
    dy: tf.Tensor, xhat: tf.Tensor, factor: tf.Tensor, dy_mean: tf.Tensor, product_mean: tf.Tensor
) -> tf.Tensor:
    """Returns the gradient of the inputs of a normalization, in FP32.

    Args:
      dy: gradient of the scaled and shifted values, FP32.
      xhat: normalized values, in the shape of `dy`.
      factor: scale over standard deviation, FP32 [c].
      dy_mean: mean of dy, FP32 [c].
      product_mean: mean of dy * xhat, FP32 [c].
    """
    return factor * (dy - dy_mean - xhat * product_mean)
