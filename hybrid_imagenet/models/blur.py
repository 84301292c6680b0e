"""Blurs features before they are sampled with a stride, so that shifts of the image alias less."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class BlurPool(keras.layers.Layer):
    """Convolves each channel of [b, h, w, c] with [1 2 1] x [1 2 1] / 16, with a stride (Zhang, arXiv 1904.11486, 3.2).

    [1 2 1] is [1 1] * [1 1], so two means over 2 x 2 pixels do it, which every device has a fast kernel for. At the
    border the outermost pixels are repeated: a constant stays one.
    """

    def __init__(self, strides: int, **kwargs: Any) -> None:
        """`strides` in pixels, the same for height and width."""
        super().__init__(**kwargs)
        self.strides = strides

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Blurs [b, h, w, c] to [b, (h - 1) // strides + 1, ..., c]."""
        padded = tf.pad(inputs, [[0, 0], [1, 1], [1, 1], [0, 0]], "SYMMETRIC")
        once = tf.nn.avg_pool2d(padded, 2, 1, "VALID")
        return tf.nn.avg_pool2d(once, 2, self.strides, "VALID")

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        batch, height, width, channels = input_shape
        sides = (None if side is None else (side - 1) // self.strides + 1 for side in (height, width))
        return (batch, *sides, channels)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"strides": self.strides}
