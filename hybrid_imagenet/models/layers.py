"""Convolution, pooling and blur with padding that is the same on all sides, as the published ResNet
results use it.

TensorFlow's `same` pads a strided window on the far side only when the input is even, which shifts
the features by a pixel against the reference implementations, so that their weights would not carry
over.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.models import kernels


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class Conv2D(keras.layers.Conv2D):
    """NHWC convolution of a square kernel, the same stride both ways and `pad` pixels of zeros on
    each side.
    """

    def __init__(self, filters: int, kernel_size: Any, *, pad: int = 0, **kwargs: Any) -> None:
        """As keras.layers.Conv2D, except that `pad` replaces `padding`."""
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
        padded = (
            batch,
            *(None if side is None else side + 2 * self.pad for side in (height, width)),
            channels,
        )
        return super().compute_output_shape(padded)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"pad": self.pad}


def cast_kernels(model: keras.Model) -> list[tuple[keras.Variable, str]]:
    """Returns the trained kernels of a model's convolutions that compute in another type, with that
    type.
    """
    found = [
        layer
        for layer in private_api.flatten_layers(model)
        if isinstance(layer, Conv2D) and layer.trainable
    ]
    return [(x.kernel, x.compute_dtype) for x in found if x.compute_dtype != x.kernel.dtype]


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class MaxPool2D(keras.layers.Layer):
    """Maximum over `pool_size` windows of non-negative [b, h, w, c], with `pad` pixels of zeros on
    each side.

    After ReLU a zero border gives the same maxima as the border of minus infinity of the reference
    networks.
    """

    def __init__(self, pool_size: int, strides: int, pad: int = 0, **kwargs: Any) -> None:
        """`pool_size`, `strides` and `pad` are in pixels, the same for height and width."""
        super().__init__(**kwargs)
        self.pool_size = pool_size
        self.strides = strides
        self.pad = pad

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Pools [b, h, w, c] to [b, (h + 2 pad - pool_size) // strides + 1, ..., c]."""
        return kernels.max_pool(inputs, self.pool_size, self.strides, self.pad)

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        batch, height, width, channels = input_shape
        more = 2 * self.pad - self.pool_size
        sides = (
            None if side is None else (side + more) // self.strides + 1 for side in (height, width)
        )
        return (batch, *sides, channels)

    def get_config(self) -> dict[str, Any]:
        own = {"pool_size": self.pool_size, "strides": self.strides, "pad": self.pad}
        return super().get_config() | own


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class BlurPool(keras.layers.Layer):
    """Convolves each channel of [b, h, w, c] with [1 2 1] x [1 2 1] / 16, with a stride (Zhang,
    arXiv 1904.11486, 3.2).

    [1 2 1] is [1 1] * [1 1], so two means over 2 x 2 pixels do it, which every device has a fast
    kernel for. At the border the outermost pixels are repeated: a constant stays one.
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
        sides = (
            None if side is None else (side - 1) // self.strides + 1 for side in (height, width)
        )
        return (batch, *sides, channels)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"strides": self.strides}
