"""The elementwise update rules, each in as few passes over memory as TensorFlow allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf


def momentum_step(
    variable: keras.Variable,
    velocity: keras.Variable,
    grad: tf.Tensor,
    *,
    rate: tf.Tensor,
    momentum: tf.Tensor,
    unscale: tf.Tensor,
    decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """v = momentum v - rate (unscale grad + decay w), then w += v, or with Nesterov w += momentum v - rate (...).

    The learning rate is inside the velocity (You et al.; MLPerf). Loss scale and rate are folded into one factor of
    the fused kernel, so that the gradient is read once; decay costs one more pass.
    """
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.value.handle,
        accum=velocity.value.handle,
        lr=rate * unscale,
        grad=grad + (decay / unscale) * variable.value if decay else grad,
        momentum=momentum,
        use_nesterov=nesterov,
    )


def classical_step(
    variable: keras.Variable,
    velocity: keras.Variable,
    grad: tf.Tensor,
    *,
    rate: tf.Tensor,
    momentum: tf.Tensor,
    unscale: tf.Tensor,
    decay: float = 0.0,
) -> None:
    """u = momentum u + (unscale grad + decay w), then w -= rate u.

    The learning rate is outside the velocity (G, equation 9), so that a change of rate acts at once.
    """
    grad = unscale * grad
    tf.raw_ops.ResourceApplyMomentum(
        var=variable.value.handle,
        accum=velocity.value.handle,
        lr=rate,
        grad=grad + decay * variable.value if decay else grad,
        momentum=momentum,
    )


def bias_correction(step: tf.Tensor, beta: float) -> tf.Tensor:
    """1 - beta^step in float32 without the cancellation of the literal form, which costs four digits at step 1."""
    return -tf.math.expm1(step * math.log(beta)) if beta > 0 else tf.ones_like(step)


def adam_step_size(step: tf.Tensor, alpha: tf.Tensor | float, beta1: float, beta2: float) -> tf.Tensor:
    """alpha sqrt(1 - beta2^t) / (1 - beta1^t), the step of Adam with both bias corrections."""
    return alpha * tf.sqrt(bias_correction(step, beta2)) / bias_correction(step, beta1)


BoundedUpdate = Callable[[list[tf.Tensor], tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor], None]


def bounded_adam(
    variables: Sequence[keras.Variable],
    first: Sequence[keras.Variable],
    second: Sequence[keras.Variable],
    decays: Sequence[float],
    *,
    beta1: float,
    beta2: float,
    eps: float,
    largest: Sequence[keras.Variable] | None = None,
    jit_compile: bool = True,
) -> BoundedUpdate:
    """Returns f(grads, unscale, step_size, lower, upper), which does for each variable (Luo et al.)

        g = unscale grad + decay w
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2        and with `largest` (AMSBound)  v' = max(v', v), used in place of v
        w = w - clip(step_size / (sqrt(v) + eps), lower, upper) m

    XLA makes one kernel per variable of it: one pass over memory instead of a dozen. Variables of the same shape and
    decay share a trace. For a processor it is compiled once per shape (28 times for the 161 variables of a ResNet-50);
    on a GPU, where each launch costs time, all are one program.
    """

    def rule(
        grad: tf.Tensor,
        w: tf.Variable,
        m: tf.Variable,
        v: tf.Variable,
        top: tf.Variable | None,
        decay: float,
        unscale: tf.Tensor,
        step_size: tf.Tensor,
        lower: tf.Tensor,
        upper: tf.Tensor,
    ) -> None:
        g = unscale * grad
        if decay:
            g += decay * w
        m_new = beta1 * m + (1.0 - beta1) * g
        v_new = beta2 * tf.ensure_shape(v, w.shape) + (1.0 - beta2) * tf.square(g)
        m.assign(m_new)
        v.assign(v_new)
        if top is not None:
            v_new = tf.maximum(top, v_new)
            top.assign(v_new)
        rate = step_size / (tf.sqrt(v_new) + eps)
        w.assign_sub(tf.minimum(tf.maximum(rate, lower), tf.maximum(upper, lower)) * m_new)

    of_one_variable = tf.function(rule, jit_compile=jit_compile, autograph=False)

    def update(grads: list[tf.Tensor], *scalars: tf.Tensor) -> None:
        maxima = [v.value for v in largest] if largest else [None] * len(second)
        for grad, w, m, v, top, decay in zip(grads, variables, first, second, maxima, decays, strict=True):
            of_one_variable(grad, w.value, m.value, v.value, top, decay, *scalars)

    on_gpu = bool(tf.config.get_visible_devices("GPU"))
    return tf.function(update, jit_compile=jit_compile and on_gpu, autograph=False)
