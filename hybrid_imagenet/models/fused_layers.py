"""Layers that compute several layers of a ResNet as one XLA program on a GPU.

Each has the variables of the layers that it replaces, under the same names, so checkpoints do not
depend on it. Without a GPU, without XLA, in validation, and for images of unknown size a layer
computes what the layers that it replaces compute.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet import xla
from hybrid_imagenet.models import kernels
from hybrid_imagenet.models.layers import Conv2D
from hybrid_imagenet.models.normalization import BatchNormalization
from hybrid_imagenet.models.normalization_program import normalize_relu
from hybrid_imagenet.models.shortcut_program import convolve_and_keep
from hybrid_imagenet.models.stem_program import normalize_relu_max_pool


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class StemNormalization(BatchNormalization):
    """Normalizes [b, h, w, c], applies ReLU and takes the maximum of 3 x 3 pixels with stride 2.

    In training on a GPU this is one program; see `stem_program`. Statistics over ranks or virtual
    GPUs are not supported.
    """

    def call(self, inputs: tf.Tensor, training: bool | None = None, mask: Any = None) -> tf.Tensor:
        """Returns [b, (h + 1) // 2, (w + 1) // 2, c]; training also updates the statistics."""
        has_even_sides = _is_static(inputs) and not any(side % 2 for side in inputs.shape[1:3])
        if not (training and self.trainable and has_even_sides and _can_compile()):
            normalized = super().call(inputs, training=training)
            return kernels.max_pool(tf.nn.relu(normalized), 3, 2, 1)
        outputs, mean, variance = normalize_relu_max_pool(
            inputs, self.gamma.value, self.beta.value, self.epsilon
        )
        self.record_statistics(mean, variance)
        return outputs

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        batch, height, width, channels = input_shape
        return (batch, _half(height), _half(width), channels)


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class NormalizationReLU(BatchNormalization):
    """Normalizes [b, h, w, c], adds a shortcut, if there is one, and applies ReLU.

    In training on a GPU this is one program; see `normalization_program`. Statistics over ranks or
    virtual GPUs are not supported.
    """

    def build(self, input_shape: Any) -> None:
        super().build(_first_shape(input_shape))
        # Keras would check that there is one input.
        self.input_spec = None

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> tf.Tensor:
        """Normalizes a tensor, or the first one of a list and adds the second one."""
        x, shortcut = inputs if isinstance(inputs, list | tuple) else (inputs, None)
        if not (training and self.trainable and _is_static(x) and _can_compile()):
            normalized = super().call(x, training=training)
            return tf.nn.relu(normalized if shortcut is None else normalized + shortcut)
        outputs, mean, variance = normalize_relu(
            x, shortcut, self.gamma.value, self.beta.value, self.epsilon
        )
        self.record_statistics(mean, variance)
        return outputs

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        return _first_shape(input_shape)


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class ForkingConv2D(Conv2D):
    """Convolves [b, h, w, c] with a 1x1 kernel, and returns the input too, for the shortcut.

    In training on a GPU the gradients of both results are added in one matrix product; see
    `shortcut_program`.
    """

    def call(self, inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the input, and its convolution [b, h, w, filters]."""
        if not (_is_static(inputs) and _can_compile()):
            return inputs, super().call(inputs)
        return convolve_and_keep(inputs, kernels.cast_value(self.kernel))

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        return tuple(input_shape), super().compute_output_shape(input_shape)


def _first_shape(input_shape: Any) -> tuple[Any, ...]:
    """Returns the shape of the tensor that is normalized, from one shape or a list of them."""
    is_list = isinstance(input_shape[0], list | tuple)
    return tuple(input_shape[0] if is_list else input_shape)


def _half(side: int | None) -> int | None:
    return None if side is None else (side + 1) // 2


def _is_static(tensor: tf.Tensor) -> bool:
    return bool(tensor.shape.is_fully_defined())


def _can_compile() -> bool:
    return xla.has_gpu() and xla.supported()
