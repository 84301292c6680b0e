"""The hybrid method of Lu et al.: AdaBound with closing bounds is the warmup of SGD with LARS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.optimizers.context import TRUST_RATIOS, UpdateContext
from hybrid_imagenet.optimizers.formulas import adam_step_size
from hybrid_imagenet.optimizers.grouped import State
from hybrid_imagenet.optimizers.lars import LayerScaledOptimizer, TrustRatio
from hybrid_imagenet.optimizers.registry import HybridOptions
from hybrid_imagenet.optimizers.trust_ratio import trust_ratio
from hybrid_imagenet.schedules import relative_step

Array = npt.NDArray[np.float64]


def hybrid_step(
    w: Array,
    grad: Array,
    m: Array,
    v: Array,
    *,
    t: int,
    warms_up: bool,
    lower: float,
    upper: float,
    learning_rate: float,
    momentum: float,
    handover: float = 1.0,
    options: HybridOptions,
) -> tuple[Array, Array, Array]:
    """Takes the whole step of Lu et al. §2.2.1 for one kernel, in the order of the paper.

    This is the definition that the class below is tested against. It has the default `handover`,
    `continuous`: SGD begins with the velocity u = P m, the last step of the warmup.

    Args:
      w: weights.
      grad: gradient, in the shape of `w`.
      m: first moment; after the first step of SGD the velocity.
      v: second moment.
      t: applied updates so far, this one included.
      warms_up: whether this is a step of the first T epochs.
      lower: AdaBound's lower bound in this step.
      upper: AdaBound's upper bound in this step; both bounds are P = lr N at T.
      learning_rate: of SGD in this step, lr N kappa^epoch.
      momentum: of SGD.
      handover: in the first step of SGD P, which turns m into the velocity u; then 1.
      options: the constants.

    Returns:
      The new w, m and v; in SGD the velocity u instead of m.
    """
    if warms_up:  # AdaBound
        m = options.adabound_beta1 * m + (1 - options.adabound_beta1) * grad
        v = options.adabound_beta2 * v + (1 - options.adabound_beta2) * grad**2
        step_size = options.adabound_lr
        if options.bias_correction:
            step_size *= np.sqrt(1 - options.adabound_beta2**t) / (1 - options.adabound_beta1**t)
        rate = np.clip(step_size / (np.sqrt(v) + options.adabound_eps), lower, upper)
        return w - rate * m, m, v
    # SGD with LARS
    assert options.lars_eta is not None
    ratio = trust_ratio(
        np.linalg.norm(w),
        np.linalg.norm(grad),
        eta=options.lars_eta,
        decay=options.weight_decay,
        eps=options.lars_eps,
        eps_rule=options.lars_eps_rule,
    )
    gradient = grad + options.weight_decay * w
    u = momentum * (handover * m) + (1 - momentum) * learning_rate * ratio * gradient
    return w - u, u, v


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class Hybrid(LayerScaledOptimizer):
    """Implements the hybrid method: AdaBound as the warmup of SGD with LARS.

    Use it with `hi.schedules.hybrid`, which sets the bounds and changes the phase.

    In phase 0, epochs 1 to T, AdaBound's step is clipped to bounds that close at P = lr N:

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        s = alpha sqrt(1 - b2^t) / (1 - b1^t)        t: applied updates
        w -= clip(s / (sqrt(v) + eps), lower, upper) m

    Without bias correction s = alpha. At T both bounds are P, so the last step is w -= P m, which
    is SGD on an averaged gradient.

    In phase 1, with the learning rate a of the schedule and the ratio of LARS for each layer:

        u = momentum u + c a ratio^s (g + weight_decay w)
        w -= u

    The exponent s may grow from 0, which gives each layer the learning rate P of the end of phase
    0, to 1, where LARS alone sets it (`hybrid_ramp_epochs` of the schedule). Without `lars_eta`,
    `fit` with `default_callbacks()` derives it from the global batch and the learning rate at the
    beginning of phase 1.

    Lu et al. do not say how the velocity u begins. `handover` chooses:

    - "continuous": u = P m, which is the last step of the warmup itself, and c = 1 - momentum. The
      new velocity averages as m did, so the size of the update does not jump at T. Momentum alone
      would raise it tenfold. If LARS gives a layer another learning rate, the update moves to it
      within about 1 / (1 - momentum) steps.
    - "reset": u = 0 and c = 1, which is SGD with momentum as in Goyal et al.
    - "rescale": u = P m / (1 - b1) and c = 1, which is the velocity that SGD with momentum would
      have built up by then.

    Both phases are one formula whose factors depend on the phase, a scalar on the device, because a
    branch in the step would make the host wait for the GPU. For the same reason m and u share one
    variable, which holds -u in phase 1. A counter of the steps of phase 1 tells the device when to
    hand over, so skipped steps and resumed runs need no special care.

    Example:
      schedule = hi.schedules.hybrid(0.1 * hi.size(), epochs=90)
      optimizer = hi.DistributedOptimizer(hi.optimizers.Hybrid(), schedule=schedule)

    Args:
      learning_rate: a, unless a schedule sets it (default: 0.1).
      momentum: momentum of SGD in phase 1, unless a schedule sets it (default: 0.9).
      weight_decay: coefficient of L2 regularization (default: 0.0).
      decay_all: whether biases and normalization parameters decay too (default: False).
      global_clipnorm: largest norm of the gradient of all weights together, averaged over ranks.
        Larger gradients are scaled down to it (default: None, no clipping).
      name: name of the optimizer (default: "", as for --optimizer).
      adabound_lr: alpha, learning rate of Adam inside AdaBound (default: 0.001).
      adabound_beta1: b1, decay of the first moment (default: 0.9).
      adabound_beta2: b2, decay of the second moment (default: 0.999).
      adabound_eps: eps, added to sqrt(v) (default: 1e-08).
      bias_correction: whether Adam's step is corrected for bias; Lu et al. print no correction
        (default: True).
      handover: how the velocity begins: "continuous", "reset" or "rescale" (default: "continuous").
      lars_eta: trust coefficient of LARS (default: None, derived by `fit`).
      lars_eps: guard of the denominator of LARS's ratio (default: 0.0).
      lars_eps_rule: "add" or "floor", see `hi.optimizers.LARS` (default: "add").
      lars_variant: "you", "larc" or "none", see `hi.optimizers.LARS` (default: "you").
      decay_in_warmup: whether weights decay in phase 0 too (default: False).
      decoupled_decay: whether each update subtracts weight_decay * learning rate / its peak times
        the weights, instead of adding decay to the gradient. The peak is that of a schedule of
        `hi.schedules`, or else `learning_rate` (default: False).

    Raises:
      ValueError: if a value is outside its bounds, or the learning rate is not a number.

    Reference:
      Lu et al. §2.2.1.
    """

    Options = HybridOptions
    slots = ("first_moment", "second_moment")
    num_phases = 2
    trust_coefficient_option = "lars_eta"

    def __init__(self, *values: Any, **options: Any):
        super().__init__(*values, **options)
        self.trust_ratio = TrustRatio(
            variant=self.options.lars_variant,
            eta=self.options.lars_eta,
            eps=self.options.lars_eps,
            eps_rule=self.options.lars_eps_rule,
        )
        self.scales_layers = self.options.lars_variant != "none"

    def build(self, variables: Any) -> None:
        """Creates the moments, and the counter of the steps of phase 1."""
        if self.built:
            return
        super().build(variables)
        self._sgd_steps = self.add_variable(shape=(), dtype="int64", name="sgd_steps")

    def counters(self) -> list[keras.Variable]:
        return [self._sgd_steps]

    def gradient_factor(self, momentum: Any) -> Any:
        return relative_step.gradient_factor(self.options.handover, momentum)

    def decay_is_on(self, hyperparameters: Mapping[str, tf.Tensor]) -> Any:
        return tf.where(hyperparameters["phase"] > 0.5, 1.0, float(self.options.decay_in_warmup))

    def prepare(self, ctx: UpdateContext) -> dict[str, tf.Tensor]:
        """Computes the step size of phase 0, the factor of the first moment, and square sums."""
        options = self.options
        is_sgd = ctx.hyperparameters["phase"] > 0.5
        lower = ctx.hyperparameters["lower_bound"]
        if options.bias_correction:
            step_size = adam_step_size(
                ctx.step, options.adabound_lr, options.adabound_beta1, options.adabound_beta2
            )
        else:
            step_size = tf.constant(options.adabound_lr, tf.float32)
        # The first step of SGD turns the first moment into -u. Both bounds are P then.
        is_first_sgd_step = tf.equal(ctx.counters[0], 0)
        handover = -_handover_scale(options) * lower * ctx.momentum
        sgd_factor = tf.where(is_first_sgd_step, handover, ctx.momentum)
        return {
            "is_sgd": is_sgd,
            "step_size": step_size,
            "upper": tf.maximum(lower, ctx.hyperparameters["upper_bound"]),
            "moment_factor": tf.where(is_sgd, sgd_factor, options.adabound_beta1),
            **self.trust_ratio.prepare(self, ctx),
        }

    def scale_layers(self, ctx: UpdateContext) -> dict[str, tf.Tensor]:
        """Computes the factor of the gradient: 1 - b1 in phase 0, minus the layer's rate later."""
        is_sgd = ctx.prepared["is_sgd"]
        scaled = self.trust_ratio.scale_layers(
            self, ctx, self.gradient_factor(ctx.momentum), ctx.hyperparameters["lars_share"]
        )
        scaled["rates"] = tf.where(is_sgd, -scaled["rates"], 1.0 - self.options.adabound_beta1)
        if TRUST_RATIOS in scaled:
            scaled[TRUST_RATIOS] = tf.where(is_sgd, scaled[TRUST_RATIOS], 1.0)
        return scaled

    def update(
        self, grad: tf.Tensor, weight: tf.Tensor, state: State, ctx: UpdateContext
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        beta2 = self.options.adabound_beta2
        is_sgd = ctx.prepared["is_sgd"]
        gradient = ctx.unscale * ctx.add_scaled_decay(grad, weight)
        # m in phase 0, -u in phase 1
        m = ctx.prepared["moment_factor"] * state["first_moment"]
        m += ctx.layers.broadcast(ctx.prepared["rates"]) * gradient
        v = state["second_moment"]
        v = tf.where(is_sgd, v, beta2 * v + (1.0 - beta2) * tf.square(gradient))
        rate = ctx.prepared["step_size"] / (tf.sqrt(v) + self.options.adabound_eps)
        rate = tf.maximum(rate, ctx.hyperparameters["lower_bound"])
        rate = tf.minimum(rate, ctx.prepared["upper"])
        weight += tf.where(is_sgd, 1.0, -rate) * m
        return weight, {"first_moment": m, "second_moment": v}


def _handover_scale(options: HybridOptions) -> float:
    """Returns the factor that, with P, turns the first moment into the velocity at T."""
    if options.handover == "reset":
        return 0.0
    if options.handover == "rescale":
        return 1.0 / (1.0 - options.adabound_beta1)
    return 1.0
