"""Decodes on the host, inside tf.data: one encoded image and one window to a uint8 square."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.data import images
from hybrid_imagenet.numerics import augment

RATIOS = (1, 2, 4, 8)
OTHER = len(RATIOS)  # the branch of PNG, GIF and BMP; a JPEG takes the branch of its reduction
RAW = OTHER + 1


def branches(
    kinds: npt.NDArray[np.int64], windows: augment.Windows, side: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Plans the decoding of each image for an output of `side` pixels.

    Args:
      kinds: images.JPEG, OTHER or RAW, int64 [k].
      windows: (y, x, height, width) in pixels of the stored images, int64 [k, 4].
      side: pixels.

    Returns:
      (branch, window): int32 [k], and the windows in pixels of the reduced images, int32 [k, 4].
    """
    ratios = np.where(kinds == images.JPEG, augment.decode_ratio(windows, side), 1)
    branch = np.where(kinds == images.JPEG, np.log2(ratios), np.where(kinds == images.RAW, RAW, OTHER))
    return branch.astype(np.int32), (windows // ratios[:, None]).astype(np.int32)


def decode(content: tf.Tensor, branch: tf.Tensor, window: tf.Tensor, side: int) -> tf.Tensor:
    """Decodes a window of an image and resizes it bilinearly, uint8 [side, side, 3].

    JPEGs are cropped while they are decoded: rows below the window and blocks beside it are not transformed.
    The fast integer DCT is within one or two grey levels of the slow one.
    """

    def jpeg(ratio: int) -> tf.Tensor:
        return tf.io.decode_and_crop_jpeg(content, window, channels=3, ratio=ratio, dct_method="INTEGER_FAST")

    def other() -> tf.Tensor:
        return cut(tf.io.decode_image(content, channels=3, expand_animations=False))

    def raw() -> tf.Tensor:
        size = tf.io.decode_raw(tf.strings.substr(content, 4, 8), tf.int32)
        pixels = tf.io.decode_raw(tf.strings.substr(content, 12, size[0] * size[1] * 3), tf.uint8)
        return cut(tf.reshape(pixels, [size[0], size[1], 3]))

    def cut(pixels: tf.Tensor) -> tf.Tensor:
        return tf.slice(pixels, [window[0], window[1], 0], [window[2], window[3], 3])

    cases = [lambda ratio=ratio: jpeg(ratio) for ratio in RATIOS]
    cropped = tf.switch_case(branch, [*cases, other, raw])
    return resize(cropped, side)


def reason(error: tf.errors.OpError) -> str:
    """Returns why an image did not decode, without the names of TensorFlow's operations."""
    return re.sub(r"\{\{.*?\}\} ?|\[Op:.*", "", str(error.message).splitlines()[0]).strip()


def resize(pixels: tf.Tensor, side: int) -> tf.Tensor:
    """Resizes uint8 [h, w, 3] bilinearly to uint8 [side, side, 3], rounded; an image of that size stays as it is."""
    resized = tf.raw_ops.ResizeBilinear(images=pixels[None], size=(side, side), half_pixel_centers=True)[0]
    return tf.ensure_shape(tf.cast(resized + 0.5, tf.uint8), (side, side, 3))
