"""Muon: momentum whose matrix, layer by layer, is made orthogonal."""

from __future__ import annotations

import math

import keras
import tensorflow as tf

from hybrid_imagenet.optimizers.context import UpdateContext, Velocity
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.kinds import ParameterKind
from hybrid_imagenet.optimizers.registry import MuonOptions

# Coefficients of Jordan et al. After five steps singular values are between about 0.7 and 1.2.
_A = 3.4445
_B = -4.7750
_C = 2.0315


def orthogonalized(matrix: tf.Tensor, steps: int) -> tf.Tensor:
    """Returns about U V^T for a matrix U S V^T, by Newton-Schulz steps in float32.

    One step is X <- a X + (b X X^T + c (X X^T)^2) X.

    Args:
      matrix: float32 [rows, columns].
      steps: Number of Newton-Schulz steps.
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
    """Implements Muon: momentum that is made orthogonal for each kernel.

        u = momentum u + g
        d = g + momentum u with Nesterov, else u
        w -= lr (max(1, outputs / inputs)^(1/2) orthogonalized(d) + weight_decay w)

    A kernel of a convolution [h, w, in, out] counts as a matrix [h w in, out], and takes the factor
    in front from that matrix, as timm does. The authors' code takes it from height over width, so
    it is 1 for each square kernel. The two differ where outputs > h w in, as in 1x1 convolutions
    that widen. Weight decay is decoupled. Biases and normalization parameters take w -= lr d. All
    of it is float32; the authors orthogonalize in bfloat16, and use another method for the last
    layer.

    Example:
      optimizer = hi.DistributedOptimizer(hi.optimizers.Muon(0.02, weight_decay=0.01))

    Args:
      learning_rate: Learning rate lr, unless a schedule sets it (default: 0.02).
      momentum: Momentum, unless a schedule sets it (default: 0.95).
      weight_decay: Part of the weights that each update subtracts, times the learning rate
        (default: 0.0).
      decay_all: Whether biases and normalization parameters decay too (default: False).
      global_clipnorm: Largest norm of the gradient of all weights together, averaged over ranks.
        Larger gradients are scaled down to it (default: None, no clipping).
      name: Name of the optimizer (default: "", as for --optimizer).
      nesterov: Whether to use Nesterov's momentum (default: True).
      steps: Newton-Schulz steps in each update (default: 5).

    Raises:
      ValueError: If a value is outside its bounds, or the learning rate is not a number.

    Reference:
      Jordan et al., Muon, 2024.
    """

    Options = MuonOptions
    Slots = Velocity

    def update(
        self, grad: tf.Tensor, weight: tf.Tensor, slots: Velocity, ctx: UpdateContext[None]
    ) -> tuple[tf.Tensor, Velocity]:
        gradient = ctx.unscale * grad
        velocity = ctx.momentum * slots.velocity + gradient
        direction = gradient + ctx.momentum * velocity if self.options.nesterov else velocity
        direction = ctx.layers.map(direction, self._orthogonalized_direction)
        step = ctx.learning_rate * ctx.add_decay(direction, weight)
        return weight - step, Velocity(velocity)

    def _orthogonalized_direction(self, position: int, values: tf.Tensor) -> tf.Tensor:
        """Returns the step of one variable, divided by the learning rate, in its shape."""
        is_kernel = self.kinds[position] is ParameterKind.KERNEL
        if not is_kernel or values.shape.rank < 2:
            return values
        outputs = values.shape[-1]
        inputs = math.prod(values.shape[:-1])
        matrix = orthogonalized(tf.reshape(values, [inputs, outputs]), self.options.steps)
        return math.sqrt(max(1.0, outputs / inputs)) * tf.reshape(matrix, values.shape)
