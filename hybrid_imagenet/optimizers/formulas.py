"""The formulas that several update rules are made of, on values."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf


def momentum_values(
    w: tf.Tensor,
    velocity: tf.Tensor,
    grad: tf.Tensor,
    *,
    rate: tf.Tensor,
    momentum: tf.Tensor,
    unscale: tf.Tensor,
    scaled_decay: Any = 0.0,
    nesterov: bool = False,
) -> tuple[tf.Tensor, tf.Tensor]:
    """v = momentum v - rate (unscale grad + decay w), then w += v, or with Nesterov w += momentum v
    - rate (...).

    The learning rate is inside the velocity (You et al.; MLPerf). `scaled_decay` is decay /
    unscale. Returns the new weights and velocity.
    """
    step = (rate * unscale) * (grad if _is_zero(scaled_decay) else grad + scaled_decay * w)
    velocity = momentum * velocity - step
    return w + (momentum * velocity - step if nesterov else velocity), velocity


def classical_values(
    w: tf.Tensor,
    velocity: tf.Tensor,
    grad: tf.Tensor,
    *,
    rate: tf.Tensor,
    momentum: tf.Tensor,
    unscale: tf.Tensor,
    decay: Any = 0.0,
) -> tuple[tf.Tensor, tf.Tensor]:
    """u = momentum u + (unscale grad + decay w), then w -= rate u.

    The learning rate is outside the velocity (Goyal et al., equation 9), so that a change of it
    acts at once. Returns the new weights and velocity.
    """
    grad = unscale * grad
    velocity = momentum * velocity + (grad if _is_zero(decay) else grad + decay * w)
    return w - rate * velocity, velocity


def _is_zero(decay: Any) -> bool:
    return isinstance(decay, float) and decay == 0.0


def bias_correction(step: tf.Tensor, beta: float) -> tf.Tensor:
    """1 - beta^step in float32 without the cancellation of the literal form, which costs four
    digits at step 1.
    """
    return -tf.math.expm1(step * math.log(beta)) if beta > 0 else tf.ones_like(step)


def adam_step_size(
    step: tf.Tensor, alpha: tf.Tensor | float, beta1: float, beta2: float
) -> tf.Tensor:
    """alpha sqrt(1 - beta2^t) / (1 - beta1^t), the step of Adam with both bias corrections."""
    return alpha * tf.sqrt(bias_correction(step, beta2)) / bias_correction(step, beta1)


def bounded_adam_values(
    w: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    grad: tf.Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    unscale: tf.Tensor,
    decay: Any,
    step_size: tf.Tensor,
    lower: tf.Tensor,
    upper: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Adam whose step is clipped (Luo et al.):

        g = unscale grad + decay w
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = w - clip(step_size / (sqrt(v) + eps), lower, upper) m

    Returns the new weights and moments.
    """
    g = unscale * grad
    if not _is_zero(decay):
        g += decay * w
    m = betas[0] * m + (1.0 - betas[0]) * g
    v = betas[1] * v + (1.0 - betas[1]) * tf.square(g)
    rate = step_size / (tf.sqrt(v) + eps)
    return w - tf.minimum(tf.maximum(rate, lower), tf.maximum(upper, lower)) * m, m, v
