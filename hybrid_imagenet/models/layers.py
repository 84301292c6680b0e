"""Convolution, pooling and blur with the same padding on all sides, as published ResNets have it.

For an even input TensorFlow's `same` pads a strided window only on the far side. That shifts the
features by a pixel relative to the reference implementations, so their weights could not be used.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.models import kernels


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class Conv2D(keras.layers.Conv2D):
    """Convolves [b, h, w, c] with a square kernel.

    Args:
      filters: Number of output channels.
      kernel_size: Pixels, the same for height and width.
      pad: Pixels of zeros on each side; replaces `padding`.
      kwargs: Arguments of keras.layers.Conv2D. Strides must be the same for height and width.
    """

    def __init__(self, filters: int, kernel_size: Any, *, pad: int = 0, **kwargs: Any) -> None:
        # `get_config` of Keras's class has `padding`.
        kwargs.pop("padding", None)
        super().__init__(filters, kernel_size, padding="valid", **kwargs)
        self.pad = pad

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Convolves [b, h, w, c] to [b, (h + 2 pad - k) // stride + 1, ..., filters]."""
        outputs = kernels.conv2d(inputs, kernels.cast_value(self.kernel), self.strides[0], self.pad)
        if self.use_bias:
            outputs = tf.nn.bias_add(outputs, self.bias)
        return outputs

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        batch, height, width, channels = input_shape
        padded_height = None if height is None else height + 2 * self.pad
        padded_width = None if width is None else width + 2 * self.pad
        return super().compute_output_shape((batch, padded_height, padded_width, channels))

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"pad": self.pad}


def kernels_to_cast(model: keras.Model) -> list[tuple[keras.Variable, str]]:
    """Returns the trainable convolution kernels whose layers compute in another type.

    Returns:
      Variables with the compute type of their layers.
    """
    result = []
    for layer in private_api.flatten_layers(model):
        if not isinstance(layer, Conv2D) or not layer.trainable:
            continue
        if layer.compute_dtype != layer.kernel.dtype:
            result.append((layer.kernel, layer.compute_dtype))
    return result


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class MaxPool2D(keras.layers.Layer):
    """Takes the maximum over windows of non-negative [b, h, w, c], padded by zeros.

    The reference networks pad by minus infinity. After a ReLU zeros give the same maxima.

    Args:
      pool_size: Side of the window in pixels.
      strides: Pixels, the same for height and width.
      pad: Pixels of zeros on each side.
      kwargs: Arguments of keras.layers.Layer.
    """

    def __init__(self, pool_size: int, strides: int, pad: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pool_size = pool_size
        self.strides = strides
        self.pad = pad

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Pools [b, h, w, c] to [b, (h + 2 pad - pool_size) // strides + 1, ..., c]."""
        return kernels.max_pool(inputs, self.pool_size, self.strides, self.pad)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        batch, height, width, channels = input_shape
        return (batch, self._output_side(height), self._output_side(width), channels)

    def _output_side(self, side: int | None) -> int | None:
        if side is None:
            return None
        return (side + 2 * self.pad - self.pool_size) // self.strides + 1

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "pool_size": self.pool_size,
            "strides": self.strides,
            "pad": self.pad,
        }


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class BlurPool(keras.layers.Layer):
    """Blurs each channel of [b, h, w, c] before it takes every `strides`-th pixel.

    The filter is [1 2 1] x [1 2 1] / 16. Because [1 2 1] is [1 1] * [1 1], it is computed as two
    means over 2 x 2 pixels, for which every device has a fast kernel. At the border the outermost
    pixels are repeated, so a constant image stays constant.

    Reference:
      Zhang, arXiv 1904.11486, section 3.2.

    Args:
      strides: Pixels, the same for height and width.
      kwargs: Arguments of keras.layers.Layer.
    """

    def __init__(self, strides: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.strides = strides

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Blurs [b, h, w, c] to [b, (h - 1) // strides + 1, ..., c]."""
        padded = tf.pad(inputs, [[0, 0], [1, 1], [1, 1], [0, 0]], "SYMMETRIC")
        first_mean = tf.nn.avg_pool2d(padded, 2, 1, "VALID")
        return tf.nn.avg_pool2d(first_mean, 2, self.strides, "VALID")

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        batch, height, width, channels = input_shape
        return (batch, self._output_side(height), self._output_side(width), channels)

    def _output_side(self, side: int | None) -> int | None:
        return None if side is None else (side - 1) // self.strides + 1

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"strides": self.strides}
