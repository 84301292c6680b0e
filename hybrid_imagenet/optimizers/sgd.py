"""Stochastic gradient descent with momentum: the baseline of Goyal et al., Lu et al. and HAL."""

from __future__ import annotations

import keras
import tensorflow as tf

from hybrid_imagenet.optimizers.context import UpdateContext
from hybrid_imagenet.optimizers.formulas import momentum_step
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer, State
from hybrid_imagenet.optimizers.registry import SgdOptions


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class SGD(GroupedOptimizer):
    """SGD with momentum m and coupled L2 decay, g = grad + weight_decay w.

    Without Nesterov (Goyal et al., equation 9):  u = m u + g;  w -= lr u.
    With Nesterov (MLPerf's reference):  v = m v - lr g;  w += m v - lr g.

    In the first form the learning rate is outside the velocity, so a change of it acts at once.
    """

    Options = SgdOptions
    slots = ("velocity",)

    def update(
        self, grad: tf.Tensor, weight: tf.Tensor, state: State, ctx: UpdateContext
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        if self.options.nesterov:
            return momentum_step(
                grad, weight, state["velocity"], ctx, rate=ctx.learning_rate, nesterov=True
            )
        gradient = ctx.add_decay(ctx.unscale * grad, weight)
        velocity = ctx.momentum * state["velocity"] + gradient
        return weight - ctx.learning_rate * velocity, {"velocity": velocity}
