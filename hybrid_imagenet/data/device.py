"""Runs the device's part of preprocessing inside the compiled step: flips, color, geometry,
scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hybrid_imagenet import xla
from hybrid_imagenet.data import augmentations as ranges

# Channel means and deviations of ImageNet's training images, for pixels in [0, 1].
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
# What takes pixels of 0 to 255 to the network's input.
SCALE = (1.0 / (255.0 * np.array(DEVIATION))).astype(np.float32)
OFFSET = (-np.array(MEAN) / np.array(DEVIATION)).astype(np.float32)


def normalize(images: tf.Tensor, dtype: tf.DType | str = tf.float32) -> tf.Tensor:
    """Takes uint8 (or float, on the scale of 0 to 255) [b, s, s, 3] to zero mean and unit variance
    per channel.

    Computed in FP32, then cast to `dtype`.
    """
    return tf.cast(tf.cast(images, tf.float32) * SCALE + OFFSET, dtype)


def uniforms(seeds: tf.Tensor, count: int, start: int = ranges.DEVICE_STREAM) -> tf.Tensor:
    """Draws [start, start + count) of each image, float32 [b, count] in [0, 1); the numbers of
    `sampling.uniforms`.

    Args:
      seeds: int64 [b, 2].
      count: draws per image.
      start: number of the first draw.
    """
    golden = 0x9E3779B97F4A7C15
    steps = tf.range(start + 1, start + count + 1, dtype=tf.int64) * _signed(golden)
    words = _mix(tf.bitwise.bitwise_xor(_mix(seeds[:, :1] + steps), seeds[:, 1:]))
    return tf.cast(_shifted(words, 40), tf.float32) * 2.0**-24


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shifted(words: tf.Tensor, bits: int) -> tf.Tensor:
    """Shifts int64 right, logically (the type that GPUs have kernels for)."""
    mask = tf.constant((1 << (64 - bits)) - 1, tf.int64)
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(words, tf.constant(bits, tf.int64)), mask)


def _mix(words: tf.Tensor) -> tf.Tensor:
    words = tf.bitwise.bitwise_xor(words, _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = tf.bitwise.bitwise_xor(words, _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return tf.bitwise.bitwise_xor(words, _shifted(words, 31))


def normals(seeds: tf.Tensor, count: int, start: int) -> tf.Tensor:
    """Returns `count` normal numbers per image, float32 [b, count], from 2 * count draws (Box and
    Muller).
    """
    draws = uniforms(seeds, 2 * count, start)
    return tf.sqrt(-2 * tf.math.log(1 - draws[:, :count])) * tf.cos(2 * math.pi * draws[:, count:])


def augment(
    images: tf.Tensor,
    seeds: tf.Tensor,
    augmentation: str,
    dtype: tf.DType | str = tf.float32,
    *,
    sony: ranges.SonyRanges = ranges.SONY,
) -> tf.Tensor:
    """Applies the device's part of a training augmentation, then `normalize`.

    Args:
      images: uint8 [b, side, side, 3] as `pipeline.training` hands them over.
      seeds: int64 [b, 2].
      augmentation: none, alexnet, inception, sony, digits or shift.
      dtype: type of the network's input.
      sony: ranges of the sony augmentation.

    Returns:
      [b, s, s, 3] of `dtype`.
    """
    if augmentation == "digits":
        return normalize(_digits(images, seeds), dtype)
    if augmentation == "shift":
        return normalize(_shift(images, seeds), dtype)
    if augmentation == "sony":
        return normalize(_sony(images, seeds, sony), dtype)
    if augmentation in ("alexnet", "inception"):
        images = _flip(images, uniforms(seeds, 1)[:, 0])
    if augmentation == "alexnet":
        images = tf.cast(images, tf.float32) + 255 * _color_noise(seeds)[:, None, None, :]
    return normalize(images, dtype)


# What XLA can make a few kernels of: the others resample with an operation that it does not have.
_COMPILED = ("none", "alexnet", "inception", "sony")


def one_pass(function: Callable[..., tf.Tensor], augmentation: str) -> Callable[..., tf.Tensor]:
    """Compiles a function of images and more where there is a GPU: one pass over the images instead
    of six.
    """
    if augmentation not in _COMPILED:
        return function
    compiled = xla.compile_on_gpu(function)

    def shaped(*values: tf.Tensor) -> tf.Tensor:
        images = compiled(*values)
        # The graph optimizer sees no shape behind a compiled program, and without one adds no sum
        # to a normalization.
        return tf.reshape(images, images.shape) if images.shape.is_fully_defined() else images

    return shaped


def _flip(images: tf.Tensor, uniform: tf.Tensor) -> tf.Tensor:
    return tf.where(uniform[:, None, None, None] < 0.5, tf.reverse(images, [2]), images)


def _color_noise(seeds: tf.Tensor) -> tf.Tensor:
    """Returns AlexNet's offset along the principal components of color: float32 [b, 3], for pixels
    in [0, 1].
    """
    weights = (
        normals(seeds, 3, ranges.DEVICE_STREAM + 1)
        * ranges.PCA_DEVIATION
        * tf.constant(ranges.PCA_VALUES)
    )
    return tf.matmul(weights, tf.constant(ranges.PCA_VECTORS), transpose_b=True)


# Bounds of the digits' augmentation, small enough that no digit turns into another.
DIGITS_ROTATION = math.radians(12)
DIGITS_SCALE = 0.12
DIGITS_SHIFT = 0.08  # of the side


def shift_bound(side: int) -> int:
    """Returns the largest shift of an image, in pixels: an eighth of its side, 4 of 32 (He et al.
    2015, 4.2).
    """
    return round(side / 8)


def _shift(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Shifts at random by whole pixels, black entering at the edge, and flips at random. uint8 [b,
    side, side, 3].

    The same as padding with zeros and cutting out a window (He et al. 2015, 4.2), in one operation.
    """
    side = images.shape[1]
    draws = uniforms(seeds, 3)
    moves = tf.floor(draws[:, 1:] * (2 * shift_bound(side) + 1)) - shift_bound(side)
    flipped = draws[:, 0] < 0.5
    direction = tf.where(flipped, -1.0, 1.0)
    start = tf.where(flipped, side - 1.0, 0.0)
    zero, one = tf.zeros_like(direction), tf.ones_like(direction)
    transforms = tf.stack(
        [direction, zero, start + moves[:, 0], zero, one, moves[:, 1], zero, zero], axis=1
    )
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=transforms,
        output_shape=tf.shape(images)[1:3],
        fill_value=_black(),
        interpolation="NEAREST",
        fill_mode="CONSTANT",
    )


def _black() -> tf.Tensor:
    """The pixel beyond the edge, in the host's memory: there the kernel for GPUs takes it from."""
    with tf.device("CPU:0"):
        return tf.constant(0.0)


def _digits(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Rotates, scales and shifts a little at random, without flips; black enters at the edge. FP32,
    0 to 255.
    """
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
        fill_value=_black(),
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
    )


def _sony(images: tf.Tensor, seeds: tf.Tensor, bounds: ranges.SonyRanges) -> tf.Tensor:
    """Applies padding, geometry, color and noise of Mikami et al.

    uint8 [b, side, side, 3] to FP32 [b, s, s, 3], 0 to 255 before contrast.
    """
    stored = images.shape[1]
    side = ranges.input_side("sony", stored)
    pad = round(bounds.pad * stored / bounds.stored)
    if pad:
        images, stored = tf.pad(images, [[0, 0], [pad, pad], [pad, pad], [0, 0]]), stored + 2 * pad
    draws = uniforms(seeds, 12)
    x, y = _sony_positions(draws, bounds, stored, side)
    pixels = _bilinear(images, x, y) / 255
    contrast = tf.pow(bounds.contrast, 2 * draws[:, 8:11] - 1)[:, None, None, :]
    brightness = (bounds.brightness * (2 * draws[:, 7] - 1))[:, None, None, None]
    pixels = (pixels + brightness - 0.5) * contrast + 0.5
    if bounds.noise:
        noise = tf.reshape(
            normals(seeds, side * side * 3, ranges.DEVICE_STREAM + 16), tf.shape(pixels)
        )
        pixels += noise * (bounds.noise * draws[:, 11])[:, None, None, None]
    return pixels * 255


def _sony_positions(
    draws: tf.Tensor, bounds: ranges.SonyRanges, stored: int, side: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns where each output pixel lies in the stored image: x and y, float32 [b, side, side]
    each.

    draws: flip, scale, aspect, rotation, center x, center y, distortion, then the draws of color.
    """
    flip, zoom, stretch, turn, right, down, bulge = (draws[:, k, None, None] for k in range(7))
    low, high = bounds.scale
    scale = low * tf.pow(high / low, zoom)
    scale_x = scale * tf.pow(bounds.aspect, stretch - 0.5)
    scale_y = scale * tf.pow(bounds.aspect, 0.5 - stretch)
    angle = bounds.rotation * (2 * turn - 1)
    distortion = tf.exp(bounds.distortion * (2 * bulge - 1)) - 1
    half = (side - 1) / 2
    offset = tf.range(side, dtype=tf.float32) - half
    dx, dy = offset[None, None, :], offset[None, :, None]
    radial = (1 + distortion * (dx**2 + dy**2) / (side / 2) ** 2) / (1 + distortion)
    dx = dx * radial * tf.where(flip < 0.5, -1.0, 1.0)
    dy = dy * radial
    center_x = (right * (stored * scale_x - side) + half) / scale_x
    center_y = (down * (stored * scale_y - side) + half) / scale_y
    cosine, sine = tf.cos(angle), tf.sin(angle)
    return (
        center_x + cosine * dx / scale_x - sine * dy / scale_y,
        center_y + sine * dx / scale_x + cosine * dy / scale_y,
    )


def _bilinear(images: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns interpolated pixels at positions float32 [b, h, w], clamped to the image; float32 [b,
    h, w, 3].
    """
    side = images.shape[1]
    flat = tf.reshape(images, [-1, side * side, 3])
    if xla.has_gpu():
        flat = tf.cast(flat, tf.float16)  # exact, and GPUs have no kernel that gathers bytes
    x, y = tf.clip_by_value(x, 0.0, side - 1.0), tf.clip_by_value(y, 0.0, side - 1.0)
    left, top = tf.floor(x), tf.floor(y)
    across, below = (x - left)[..., None], (y - top)[..., None]

    def corner(step_x: int, step_y: int) -> tf.Tensor:
        # In FP32, which holds these numbers exactly: GPUs have no kernels that compute with int32.
        at = tf.minimum(top + step_y, side - 1.0) * side + tf.minimum(left + step_x, side - 1.0)
        return tf.cast(tf.gather(flat, tf.cast(at, tf.int32), batch_dims=1), tf.float32)

    upper = corner(0, 0) * (1 - across) + corner(1, 0) * across
    lower = corner(0, 1) * (1 - across) + corner(1, 1) * across
    return upper * (1 - below) + lower * below
