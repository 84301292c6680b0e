"""Stochastic gradient descent with momentum: the baseline of Goyal et al., Lu et al. and HAL."""

from __future__ import annotations

import keras
import tensorflow as tf

from hybrid_imagenet.optimizers.context import UpdateContext, Velocity
from hybrid_imagenet.optimizers.formulas import momentum_step
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.registry import SgdOptions


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class SGD(GroupedOptimizer):
    """Implements SGD with momentum and weight decay.

    For a gradient and weights w, with g = gradient + weight_decay w and momentum m:

        u = m u + g;         w -= lr u              without Nesterov (Goyal et al., equation 9)
        v = m v - lr g;      w += m v - lr g        with Nesterov (MLPerf's reference)

    In the first form the learning rate is outside the velocity, so a change of it acts at once.

    Example:
      optimizer = hi.DistributedOptimizer(hi.optimizers.SGD(0.1, weight_decay=1e-4))

    Args:
      learning_rate: Learning rate, unless a schedule sets it (default: 0.1).
      momentum: Momentum m, unless a schedule sets it (default: 0.9).
      weight_decay: Coefficient of L2 regularization (default: 0.0).
      decay_all: Whether biases and normalization parameters decay too (default: False).
      global_clipnorm: Largest norm of the gradient of all weights together, averaged over ranks.
        Larger gradients are scaled down to it (default: None, no clipping).
      name: Name of the optimizer (default: "", as for --optimizer).
      nesterov: Whether to use Nesterov's momentum (default: False).
      decoupled_decay: Whether each update subtracts weight_decay * learning rate / its peak times
        the weights, instead of adding decay to the gradient. The peak is that of a schedule of
        `hi.schedules`, or else `learning_rate` (default: False).

    Raises:
      ValueError: If a value is outside its bounds, or the learning rate is not a number.

    Reference:
      Goyal et al., arXiv 1706.02677; Loshchilov, Hutter, arXiv 1711.05101, for decoupled_decay.
    """

    Options = SgdOptions
    Slots = Velocity

    def update(
        self, grad: tf.Tensor, weight: tf.Tensor, slots: Velocity, ctx: UpdateContext[None]
    ) -> tuple[tf.Tensor, Velocity]:
        if self.options.nesterov:
            return momentum_step(
                grad, weight, slots.velocity, ctx, rate=ctx.learning_rate, nesterov=True
            )
        gradient = ctx.add_decay(ctx.unscale * grad, weight)
        velocity = ctx.momentum * slots.velocity + gradient
        return weight - ctx.learning_rate * velocity, Velocity(velocity)
