"""The part of preprocessing that runs on the device, inside the compiled step: flips, colour, geometry, scaling."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from hybrid_imagenet.numerics import augment as constants

# Channel means and deviations of ImageNet's training images, for pixels in [0, 1].
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)


def normalize(images: tf.Tensor, dtype: tf.DType | str = tf.float32) -> tf.Tensor:
    """uint8 (or float, on the scale of 0 to 255) [b, s, s, 3] to zero mean and unit variance per channel.

    Computed in FP32, then cast to `dtype`.
    """
    scale = 1.0 / (255.0 * np.array(DEVIATION))
    offset = -np.array(MEAN) / np.array(DEVIATION)
    return tf.cast(tf.cast(images, tf.float32) * scale.astype(np.float32) + offset.astype(np.float32), dtype)


def uniforms(seeds: tf.Tensor, count: int, start: int = constants.DEVICE_STREAM) -> tf.Tensor:
    """Draws [start, start + count) of each image, float32 [b, count] in [0, 1); the numbers of `sampling.uniforms`.

    Args:
      seeds: int64 [b, 2].
      count: draws per image.
      start: number of the first draw.
    """
    golden = 0x9E3779B97F4A7C15
    steps = tf.constant([_signed((start + k) * golden) for k in range(1, count + 1)], tf.int64)
    words = _mix(tf.bitwise.bitwise_xor(_mix(seeds[:, :1] + steps), seeds[:, 1:]))
    return tf.cast(_shifted(words, 40), tf.float32) * 2.0**-24


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shifted(words: tf.Tensor, bits: int) -> tf.Tensor:
    """Logical right shift of int64 (the type that GPUs have kernels for)."""
    mask = tf.constant((1 << (64 - bits)) - 1, tf.int64)
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(words, tf.constant(bits, tf.int64)), mask)


def _mix(words: tf.Tensor) -> tf.Tensor:
    words = tf.bitwise.bitwise_xor(words, _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = tf.bitwise.bitwise_xor(words, _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return tf.bitwise.bitwise_xor(words, _shifted(words, 31))


def augment(images: tf.Tensor, seeds: tf.Tensor, augmentation: str, dtype: tf.DType | str = tf.float32) -> tf.Tensor:
    """The device's part of a training augmentation, then `normalize`.

    Args:
      images: uint8 [b, side, side, 3] as `pipeline.training` hands them over.
      seeds: int64 [b, 2].
      augmentation: none, alexnet, inception or digits.
      dtype: type of the network's input.

    Returns:
      [b, s, s, 3] of `dtype`.
    """
    if augmentation == "digits":
        return normalize(_digits(images, seeds), dtype)
    if augmentation in ("alexnet", "inception"):
        images = _flip(images, uniforms(seeds, 1)[:, 0])
    return normalize(images, dtype)


def _flip(images: tf.Tensor, uniform: tf.Tensor) -> tf.Tensor:
    """Mirrors the images whose number (float32 [b]) is below one half."""
    return tf.where(uniform[:, None, None, None] < 0.5, tf.reverse(images, [2]), images)


# Bounds of the digits' augmentation, small enough that no digit turns into another.
DIGITS_ROTATION = math.radians(12)
DIGITS_SCALE = 0.12
DIGITS_SHIFT = 0.08  # of the side


def _digits(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """A small random rotation, scaling and shift, never a flip; black enters at the edge. FP32, 0 to 255."""
    side = tf.cast(tf.shape(images)[1], tf.float32)
    draws = 2 * uniforms(seeds, 4) - 1
    angle = DIGITS_ROTATION * draws[:, 0]
    zoom = 1 + DIGITS_SCALE * draws[:, 1]
    cosine, sine = tf.cos(angle) * zoom, tf.sin(angle) * zoom
    center = (side - 1) / 2
    shift = DIGITS_SHIFT * side * draws[:, 2:]
    x = center + shift[:, 0] - cosine * center + sine * center
    y = center + shift[:, 1] - sine * center - cosine * center
    zero = tf.zeros_like(x)
    transforms = tf.stack([cosine, -sine, x, sine, cosine, y, zero, zero], axis=1)
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=tf.cast(images, tf.float32),
        transforms=transforms,
        output_shape=tf.shape(images)[1:3],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
    )
