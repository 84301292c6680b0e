"""Muon: momentum whose matrix, layer by layer, is made orthogonal."""

from __future__ import annotations

import math
from collections.abc import Mapping

import keras
import tensorflow as tf

from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.kinds import ParameterKind
from hybrid_imagenet.optimizers.registry import MuonOptions
from hybrid_imagenet.optimizers.rule import WEIGHTS, Step

_A, _B, _C = 3.4445, -4.7750, 2.0315  # Jordan et al.; singular values end between some 0.7 and 1.2


def orthogonalized(matrix: tf.Tensor, steps: int) -> tf.Tensor:
    """U V^T, nearly, of a matrix U S V^T, by Newton-Schulz steps in float32: X <- a X + (b X X^T +
    c (X X^T)^2) X.
    """
    rows, columns = matrix.shape
    x = matrix / (tf.norm(matrix) + 1e-7)
    if rows > columns:
        x = tf.transpose(x)
    for _ in range(steps):
        gram = tf.matmul(x, x, transpose_b=True)
        x = _A * x + tf.matmul(_B * gram + _C * tf.matmul(gram, gram), x)
    return tf.transpose(x) if rows > columns else x


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class Muon(GroupedOptimizer):
    """Momentum, orthogonalized by Newton-Schulz steps (Jordan et al., Muon, 2024), for kernels.

        u = momentum u + g;  d = g + momentum u, with Nesterov, or u
        w -= lr (max(1, outputs / inputs)^(1/2) orthogonalized(d) + weight_decay w)

    A kernel of a convolution [h, w, in, out] counts as a matrix [h w in, out], and takes the factor
    in front from that matrix, as timm does. The authors' code takes it from height over width, so
    that it is 1 for each square kernel; the two differ where outputs > h w in, as in 1x1
    convolutions that widen. Decay is beside the gradient, not in it. Biases and normalization
    parameters take the inner rule, w -= lr other_rate d. All of it is float32; the authors
    orthogonalize in bfloat16, and leave the last layer to another method.
    """

    Options = MuonOptions
    slots = ("velocity",)

    def rule(
        self, grad: tf.Tensor, values: Mapping[str, tf.Tensor], step: Step
    ) -> dict[str, tf.Tensor]:
        momentum, rate, g = step.hyper["momentum"], step.hyper["learning_rate"], step.unscale * grad
        velocity = momentum * values["velocity"] + g
        direction = step.each(
            g + momentum * velocity if self.options.nesterov else velocity, self._direction
        )
        w = values[WEIGHTS]
        return {WEIGHTS: w - rate * (direction + step.decay * w), "velocity": velocity}

    def _direction(self, position: int, values: tf.Tensor) -> tf.Tensor:
        """The step of variable number `position`, over the learning rate, in its shape."""
        if self.kinds[position] is not ParameterKind.KERNEL or values.shape.rank < 2:
            return self.options.other_rate * values
        outputs = values.shape[-1]
        inputs = math.prod(values.shape[:-1])
        matrix = orthogonalized(tf.reshape(values, [inputs, outputs]), self.options.steps)
        return math.sqrt(max(1.0, outputs / inputs)) * tf.reshape(matrix, values.shape)
