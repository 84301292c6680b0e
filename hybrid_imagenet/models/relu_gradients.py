"""Gets Grappler to fuse the gradient of a ReLU into that of the normalization in front of it, on GPUs in FP16.

cuDNN normalizes and takes the ReLU in one kernel, forward and backward, and TensorFlow's graph optimizer (the remapper)
puts both in. It walks the graph from its end and needs shapes, which it infers only when it meets a forward pair; by
then it has passed all gradients, and leaves each with a ReLU gradient of its own, 49 in a ResNet-50 that read and write
every activation once more. A forward pair behind the last gradient makes it infer shapes first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

_SHAPE = (1, 2, 2, 4)  # cuDNN's kernels want a multiple of four channels, a variance more than one pixel


def shapes_first(losses: tf.Tensor, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the losses, unchanged, behind a normalization and ReLU of a few numbers of the first layer's gradient.

    Args:
      losses: float32 [b].
      gradients: of the variables from the first layer on; the first is computed last, so this comes after all.
    """
    numbers = tf.reshape(tf.reshape(gradients[0], [-1])[: math.prod(_SHAPE)], _SHAPE)
    nothing = tf.zeros([0])
    normal = tf.raw_ops.FusedBatchNormV3(
        x=tf.cast(numbers, tf.float16),
        scale=tf.ones(_SHAPE[-1:]),
        offset=tf.zeros(_SHAPE[-1:]),
        mean=nothing,
        variance=nothing,
        data_format="NHWC",
        is_training=True,
    )
    with tf.control_dependencies([tf.nn.relu(normal.y)]):
        return tf.identity(losses)
