"""Formulas that several update rules share."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from hybrid_imagenet.optimizers.context import UpdateContext, Velocity


def momentum_step(
    grad: tf.Tensor,
    weight: tf.Tensor,
    velocity: tf.Tensor,
    ctx: UpdateContext[Any],
    *,
    rate: tf.Tensor,
    nesterov: bool,
) -> tuple[tf.Tensor, Velocity]:
    """Takes a step of momentum with the learning rate inside the velocity (You et al.; MLPerf).

        v = momentum v - rate (grad + weight_decay w)
        w += v, or with Nesterov  w += momentum v - rate (grad + weight_decay w)

    Args:
      grad: Gradient, float32, still multiplied by the loss scale.
      weight: Weights, float32, same shape as `grad`.
      velocity: Velocity v, same shape as `grad`.
      ctx: Context of this step.
      rate: Learning rate, a scalar or one per element.
      nesterov: Whether to use Nesterov's momentum.

    Returns:
      The new weights and the new velocity.
    """
    step = (rate * ctx.unscale) * ctx.add_scaled_decay(grad, weight)
    velocity = ctx.momentum * velocity - step
    move = ctx.momentum * velocity - step if nesterov else velocity
    return weight + move, Velocity(velocity)


def bias_correction(step: tf.Tensor, beta: float) -> tf.Tensor:
    """Returns 1 - beta^step in float32.

    The literal form cancels, which costs four digits at step 1; expm1 does not.
    """
    if beta == 0:
        return tf.ones_like(step)
    return -tf.math.expm1(step * math.log(beta))


def adam_step_size(
    step: tf.Tensor, alpha: tf.Tensor | float, beta1: float, beta2: float
) -> tf.Tensor:
    """Returns alpha sqrt(1 - beta2^t) / (1 - beta1^t): Adam's step with both bias corrections."""
    return alpha * tf.sqrt(bias_correction(step, beta2)) / bias_correction(step, beta1)
