"""Augments and normalizes images on the device, inside the compiled step."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hybrid_imagenet import xla
from hybrid_imagenet.data import augmentations as ranges

# Mean and standard deviation of each channel over ImageNet's training images, for pixels in [0, 1].
MEAN = (0.485, 0.456, 0.406)
STANDARD_DEVIATION = (0.229, 0.224, 0.225)
# `pixels * SCALE + OFFSET` normalizes pixels of 0 to 255.
SCALE = (1.0 / (255.0 * np.array(STANDARD_DEVIATION))).astype(np.float32)
OFFSET = (-np.array(MEAN) / np.array(STANDARD_DEVIATION)).astype(np.float32)


def normalize(images: tf.Tensor, dtype: tf.DType | str = tf.float32) -> tf.Tensor:
    """Normalizes pixels to zero mean and unit variance per channel.

    Mean and variance were measured on ImageNet. The computation is in FP32.

    Args:
      images: uint8 or float [b, s, s, 3], 0 to 255.
      dtype: Type of the result.

    Returns:
      [b, s, s, 3] of `dtype`.
    """
    return tf.cast(tf.cast(images, tf.float32) * SCALE + OFFSET, dtype)


def uniforms(seeds: tf.Tensor, count: int, start: int = ranges.DEVICE_STREAM) -> tf.Tensor:
    """Returns uniform random numbers of each image.

    They are the same as those of `sampling.uniforms` on the host.

    Args:
      seeds: int64 [b, 2].
      count: Number of draws per image.
      start: Number of the first draw.

    Returns:
      Draws start to start + count - 1 of each image, float32 [b, count] in [0, 1).
    """
    # The increment of SplitMix64: 2^64 divided by the golden ratio.
    golden = 0x9E3779B97F4A7C15
    steps = tf.range(start + 1, start + count + 1, dtype=tf.int64) * _to_int64(golden)
    words = _mix(tf.bitwise.bitwise_xor(_mix(seeds[:, :1] + steps), seeds[:, 1:]))
    return tf.cast(_shift_right(words, 40), tf.float32) * 2.0**-24


def _to_int64(value: int) -> int:
    """Returns the int64 with the same bits as the lowest 64 bits of a number."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift_right(words: tf.Tensor, bits: int) -> tf.Tensor:
    """Shifts words to the right and fills with zeros.

    The words are int64, because that is the type that GPUs have kernels for.
    """
    mask = tf.constant((1 << (64 - bits)) - 1, tf.int64)
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(words, tf.constant(bits, tf.int64)), mask)


def _mix(words: tf.Tensor) -> tf.Tensor:
    """Computes the output function of SplitMix64, as `sampling.mix` on the host."""
    words = tf.bitwise.bitwise_xor(words, _shift_right(words, 30)) * _to_int64(0xBF58476D1CE4E5B9)
    words = tf.bitwise.bitwise_xor(words, _shift_right(words, 27)) * _to_int64(0x94D049BB133111EB)
    return tf.bitwise.bitwise_xor(words, _shift_right(words, 31))


def normals(seeds: tf.Tensor, count: int, start: int) -> tf.Tensor:
    """Returns normally distributed random numbers of each image (Box-Muller).

    Args:
      seeds: int64 [b, 2].
      count: Numbers per image. It takes 2 * count draws.
      start: Number of the first draw.

    Returns:
      float32 [b, count], with mean 0 and variance 1.
    """
    draws = uniforms(seeds, 2 * count, start)
    radius = tf.sqrt(-2 * tf.math.log(1 - draws[:, :count]))
    return radius * tf.cos(2 * math.pi * draws[:, count:])


def augment(
    images: tf.Tensor,
    seeds: tf.Tensor,
    augmentation: str,
    dtype: tf.DType | str = tf.float32,
    *,
    flash: ranges.FlashRanges = ranges.FLASH,
) -> tf.Tensor:
    """Applies the device's part of a training augmentation, then `normalize`.

    Args:
      images: uint8 [b, side, side, 3] from `pipeline.training_batches`.
      seeds: int64 [b, 2].
      augmentation: None, alexnet, inception, flash, digits or shift.
      dtype: Type of the network's input.
      flash: Ranges of the flash augmentation.

    Returns:
      [b, s, s, 3] of `dtype`.
    """
    if augmentation == "digits":
        return normalize(_digits(images, seeds), dtype)
    if augmentation == "shift":
        return normalize(_shift(images, seeds), dtype)
    if augmentation == "flash":
        return normalize(_flash(images, seeds, flash), dtype)
    if augmentation in ("alexnet", "inception"):
        images = _flip(images, uniforms(seeds, 1)[:, 0])
    if augmentation == "alexnet":
        images = tf.cast(images, tf.float32) + 255 * _color_noise(seeds)[:, None, None, :]
    return normalize(images, dtype)


# XLA compiles these to a few kernels. The others resample with an operation that XLA does not have.
_XLA_AUGMENTATIONS = ("none", "alexnet", "inception", "flash")


def compile_preprocessing(
    function: Callable[..., tf.Tensor], augmentation: str
) -> Callable[..., tf.Tensor]:
    """Compiles a preprocessing function if there is a GPU.

    Compiled, it makes one pass over the images instead of six.

    Args:
      function: A function of tensors that returns images.
      augmentation: The augmentation that it applies; not all can be compiled.
    """
    if augmentation not in _XLA_AUGMENTATIONS:
        return function
    compiled = xla.compile_on_gpu(function)

    def shaped(*values: tf.Tensor) -> tf.Tensor:
        images = compiled(*values)
        # The graph optimizer does not see the shape of a compiled program's result. Without one it
        # does not fuse an addition into a normalization.
        return tf.reshape(images, images.shape) if images.shape.is_fully_defined() else images

    return shaped


def _flip(images: tf.Tensor, uniform: tf.Tensor) -> tf.Tensor:
    return tf.where(uniform[:, None, None, None] < 0.5, tf.reverse(images, [2]), images)


def _color_noise(seeds: tf.Tensor) -> tf.Tensor:
    """Returns AlexNet's color offsets along the principal components of color.

    Returns:
      float32 [b, 3], for pixels in [0, 1].
    """
    draws = normals(seeds, 3, ranges.DEVICE_STREAM + 1)
    weights = draws * ranges.PCA_DEVIATION * tf.constant(ranges.PCA_VALUES)
    return tf.matmul(weights, tf.constant(ranges.PCA_VECTORS), transpose_b=True)


# Bounds of the digits' augmentation, which are so small that no digit looks like another one: the
# rotation in radians, and scale and shift as fractions of the side.
DIGITS_ROTATION = math.radians(12)
DIGITS_SCALE = 0.12
DIGITS_SHIFT = 0.08


def shift_bound(side: int) -> int:
    """Returns the largest shift of an image in pixels, an eighth of its side.

    Reference: He et al. 2015, section 4.2 (4 of 32 pixels).
    """
    return round(side / 8)


def _shift(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Shifts by random whole pixels, fills with black, and flips at random.

    This is padding with zeros and cropping (He et al. 2015, section 4.2) in one operation.

    Args:
      images: uint8 [b, s, s, 3].
      seeds: int64 [b, 2].

    Returns:
      uint8 [b, s, s, 3].
    """
    side = images.shape[1]
    draws = uniforms(seeds, 3)
    moves = tf.floor(draws[:, 1:] * (2 * shift_bound(side) + 1)) - shift_bound(side)
    is_flipped = draws[:, 0] < 0.5
    direction = tf.where(is_flipped, -1.0, 1.0)
    start = tf.where(is_flipped, side - 1.0, 0.0)
    zero = tf.zeros_like(direction)
    one = tf.ones_like(direction)
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
    """Returns the pixel beyond the edge, in host memory as GPU kernels expect it."""
    with tf.device("CPU:0"):
        return tf.constant(0.0)


def _digits(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Rotates, scales and shifts by small random amounts, and does not flip.

    Pixels from beyond the edge are black.

    Args:
      images: uint8 [b, s, s, 3].
      seeds: int64 [b, 2].

    Returns:
      float32 [b, s, s, 3], 0 to 255.
    """
    side = tf.cast(tf.shape(images)[1], tf.float32)
    draws = 2 * uniforms(seeds, 4) - 1
    angle = DIGITS_ROTATION * draws[:, 0]
    zoom = 1 + DIGITS_SCALE * draws[:, 1]
    cosine = tf.cos(angle) * zoom
    sine = tf.sin(angle) * zoom
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


def _flash(images: tf.Tensor, seeds: tf.Tensor, bounds: ranges.FlashRanges) -> tf.Tensor:
    """Applies padding, geometry, color and noise of Mikami et al.

    Args:
      images: uint8 [b, stored_side, stored_side, 3].
      seeds: int64 [b, 2].
      bounds: The random ranges.

    Returns:
      float32 [b, s, s, 3], on the scale of 0 to 255; contrast and noise may exceed it.
    """
    stored_side = images.shape[1]
    side = ranges.input_side("flash", stored_side)
    pad = round(bounds.pad * stored_side / bounds.stored)
    if pad:
        images = tf.pad(images, [[0, 0], [pad, pad], [pad, pad], [0, 0]])
        stored_side += 2 * pad
    draws = uniforms(seeds, 12)
    x, y = _flash_positions(draws, bounds, stored_side, side)
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


def _flash_positions(
    draws: tf.Tensor, bounds: ranges.FlashRanges, stored_side: int, side: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the position of each output pixel in the stored image.

    Args:
      draws: Uniform numbers for flip, scale, aspect ratio, rotation, center x, center y and
        distortion, then those for color, float32 [b, n].
      bounds: The random ranges.
      stored_side: Pixels of the stored image, with its padding.
      side: Pixels of the output.

    Returns:
      Coordinates x and y, float32 [b, side, side] each.
    """
    # Column k as [b, 1, 1], to be broadcast over the pixels.
    flip_draw, scale_draw, aspect_draw, rotation_draw, x_draw, y_draw, distortion_draw = (
        draws[:, k, None, None] for k in range(7)
    )
    low, high = bounds.scale
    scale = low * tf.pow(high / low, scale_draw)
    scale_x = scale * tf.pow(bounds.aspect, aspect_draw - 0.5)
    scale_y = scale * tf.pow(bounds.aspect, 0.5 - aspect_draw)
    angle = bounds.rotation * (2 * rotation_draw - 1)
    distortion = tf.exp(bounds.distortion * (2 * distortion_draw - 1)) - 1
    half = (side - 1) / 2
    offset = tf.range(side, dtype=tf.float32) - half
    dx = offset[None, None, :]
    dy = offset[None, :, None]
    radial = (1 + distortion * (dx**2 + dy**2) / (side / 2) ** 2) / (1 + distortion)
    dx = dx * radial * tf.where(flip_draw < 0.5, -1.0, 1.0)
    dy = dy * radial
    center_x = (x_draw * (stored_side * scale_x - side) + half) / scale_x
    center_y = (y_draw * (stored_side * scale_y - side) + half) / scale_y
    cosine = tf.cos(angle)
    sine = tf.sin(angle)
    return (
        center_x + cosine * dx / scale_x - sine * dy / scale_y,
        center_y + sine * dx / scale_x + cosine * dy / scale_y,
    )


def _bilinear(images: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Interpolates the pixels at given positions, which are clamped to the image.

    Args:
      images: uint8 [b, side, side, 3].
      x: float32 [b, h, w].
      y: float32 [b, h, w].

    Returns:
      float32 [b, h, w, 3].
    """
    side = images.shape[1]
    flat = tf.reshape(images, [-1, side * side, 3])
    if xla.has_gpu():
        # GPUs have no kernel that gathers bytes. FP16 holds the values exactly.
        flat = tf.cast(flat, tf.float16)
    x = tf.clip_by_value(x, 0.0, side - 1.0)
    y = tf.clip_by_value(y, 0.0, side - 1.0)
    left = tf.floor(x)
    top = tf.floor(y)
    right_weight = (x - left)[..., None]
    lower_weight = (y - top)[..., None]

    def corner(step_x: int, step_y: int) -> tf.Tensor:
        # Computed in FP32, which holds these numbers exactly, because GPUs have no kernels for
        # int32 arithmetic.
        row = tf.minimum(top + step_y, side - 1.0)
        column = tf.minimum(left + step_x, side - 1.0)
        index = row * side + column
        return tf.cast(tf.gather(flat, tf.cast(index, tf.int32), batch_dims=1), tf.float32)

    upper = corner(0, 0) * (1 - right_weight) + corner(1, 0) * right_weight
    lower = corner(0, 1) * (1 - right_weight) + corner(1, 1) * right_weight
    return upper * (1 - lower_weight) + lower * lower_weight
