"""Layer that computes the end of a ResNet's stem as one XLA program on a GPU.

It has the variables of the layers that it replaces, under the same names, so checkpoints do not
depend on it. Without a GPU, without XLA, in validation, and for images of unknown size it computes
what the layers that it replaces compute.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet import xla
from hybrid_imagenet.models import kernels
from hybrid_imagenet.models.normalization import BatchNormalization
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


def _half(side: int | None) -> int | None:
    return None if side is None else (side + 1) // 2


def _is_static(tensor: tf.Tensor) -> bool:
    return bool(tensor.shape.is_fully_defined())


def _can_compile() -> bool:
    return xla.has_gpu() and xla.supported()
