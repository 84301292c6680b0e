"""The hybrid method of Lu et al.: AdaBound with closing bounds is the warmup of SGD with LARS."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.optimizers import lars
from hybrid_imagenet.optimizers.context import (
    LayerRates,
    Moments,
    PrepareContext,
    UpdateContext,
)
from hybrid_imagenet.optimizers.formulas import adam_step_size
from hybrid_imagenet.optimizers.hyperparameters import StepHyperparameters
from hybrid_imagenet.optimizers.layer_scaled import LayerScaledOptimizer, LayerScaling
from hybrid_imagenet.optimizers.registry import HybridOptions

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
      w: Weights.
      grad: Gradient, in the shape of `w`.
      m: First moment; after the first step of SGD the velocity.
      v: Second moment.
      t: Applied updates so far, this one included.
      warms_up: Whether this is a step of the first T epochs.
      lower: AdaBound's lower bound in this step.
      upper: AdaBound's upper bound in this step; both bounds are P = lr N at T.
      learning_rate: Learning rate of SGD in this step, lr N kappa^epoch.
      momentum: Momentum of SGD.
      handover: Handover in the first step of SGD P, which turns m into the velocity u; then 1.
      options: The constants.

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
    assert options.trust_coefficient is not None
    weight_norm = float(np.linalg.norm(w))
    gradient_norm = float(np.linalg.norm(grad))
    ratio = 1.0
    if weight_norm > 0 and gradient_norm > 0:
        denominator = gradient_norm + options.weight_decay * weight_norm
        if options.lars_eps_rule == "floor":
            denominator = max(denominator, options.lars_eps)
        else:
            denominator += options.lars_eps
        ratio = options.trust_coefficient * weight_norm / denominator
    gradient = grad + options.weight_decay * w
    u = momentum * (handover * m) + (1 - momentum) * learning_rate * ratio * gradient
    return w - u, u, v


class HybridTerms(NamedTuple):
    """Terms of hybrid that do not depend on the gradients.

    Attributes:
      is_sgd: Whether this is a step of phase 1, bool.
      step_size: Step size s of AdaBound.
      upper_bound: Upper bound of AdaBound's rate, not below the lower one.
      moment_factor: Factor of the old first moment, which is -u in phase 1.
      weight_norms: L2 norm |w| of each variable, float32 [n]; None if LARS scales no layer.
    """

    is_sgd: tf.Tensor
    step_size: tf.Tensor
    upper_bound: tf.Tensor
    moment_factor: tf.Tensor
    weight_norms: tf.Tensor | None


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
    0, to 1, where LARS alone sets it (`hybrid_ramp_epochs` of the schedule). Without
    `trust_coefficient`, `fit` with `default_callbacks()` derives it from the global batch and the
    learning rate at the beginning of phase 1.

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
      learning_rate: Learning rate a, unless a schedule sets it (default: 0.1).
      momentum: Momentum of SGD in phase 1, unless a schedule sets it (default: 0.9).
      weight_decay: Coefficient of L2 regularization (default: 0.0).
      decay_all: Whether biases and normalization parameters decay too (default: False).
      global_clipnorm: Largest norm of the gradient of all weights together, averaged over ranks.
        Larger gradients are scaled down to it (default: None, no clipping).
      name: Name of the optimizer (default: "", as for --optimizer).
      adabound_lr: Learning rate alpha of Adam inside AdaBound (default: 0.001).
      adabound_beta1: Decay b1 of the first moment (default: 0.9).
      adabound_beta2: Decay b2 of the second moment (default: 0.999).
      adabound_eps: Term eps, added to sqrt(v) (default: 1e-08).
      bias_correction: Whether Adam's step is corrected for bias; Lu et al. print no correction
        (default: True).
      handover: How the velocity begins: "continuous", "reset" or "rescale" (default: "continuous").
      trust_coefficient: Coefficient eta of LARS (default: None, derived by `fit`).
      lars_eps: Guard of the denominator of LARS's ratio (default: 0.0).
      lars_eps_rule: "add" or "floor", see `hi.optimizers.LARS` (default: "add").
      lars_variant: "you", "larc" or "none", see `hi.optimizers.LARS` (default: "you").
      decay_in_warmup: Whether weights decay in phase 0 too (default: False).
      decoupled_decay: Whether each update subtracts weight_decay * learning rate / its peak times
        the weights, instead of adding decay to the gradient. The peak is that of a schedule of
        `hi.schedules`, or else `learning_rate` (default: False).

    Raises:
      ValueError: If a value is outside its bounds, or the learning rate is not a number.

    Reference:
      Lu et al. §2.2.1.
    """

    Options = HybridOptions
    Slots = Moments
    num_phases = 2

    @property
    def layer_scaling(self) -> LayerScaling:
        options = self.options
        return LayerScaling(
            options.lars_variant, options.trust_coefficient, options.lars_eps, options.lars_eps_rule
        )

    def build(self, variables: Any) -> None:
        """Creates the moments, and the counter of the steps of phase 1."""
        if self.built:
            return
        super().build(variables)
        self._sgd_steps = self.add_variable(shape=(), dtype="int64", name="sgd_steps")

    def counters(self) -> list[keras.Variable]:
        return [self._sgd_steps]

    def decay_is_on(self, hyperparameters: StepHyperparameters) -> Any:
        return tf.where(hyperparameters.phase > 0.5, 1.0, float(self.options.decay_in_warmup))

    def prepare(self, ctx: PrepareContext) -> HybridTerms:
        options = self.options
        is_sgd = ctx.hyperparameters.phase > 0.5
        lower_bound = ctx.hyperparameters.lower_bound
        if options.bias_correction:
            step_size = adam_step_size(
                ctx.step, options.adabound_lr, options.adabound_beta1, options.adabound_beta2
            )
        else:
            step_size = tf.constant(options.adabound_lr, tf.float32)
        # The first step of SGD turns the first moment into -u. Both bounds are P then.
        is_first_sgd_step = tf.equal(ctx.counters[0], 0)
        handover = -_handover_scale(options) * lower_bound * ctx.momentum
        sgd_factor = tf.where(is_first_sgd_step, handover, ctx.momentum)
        return HybridTerms(
            is_sgd=is_sgd,
            step_size=step_size,
            upper_bound=tf.maximum(lower_bound, ctx.hyperparameters.upper_bound),
            moment_factor=tf.where(is_sgd, sgd_factor, options.adabound_beta1),
            weight_norms=lars.weight_norms(self, ctx),
        )

    def scale_layers(
        self, gradient_norms: tf.Tensor, terms: HybridTerms, hyperparameters: StepHyperparameters
    ) -> LayerRates:
        """Computes the learning rates of SGD with LARS, c a ratio^s; phase 0 does not use them."""
        rates, ratios = lars.layer_rates(
            self,
            terms.weight_norms,
            gradient_norms,
            hyperparameters.learning_rate,
            factor=self.options.gradient_factor(hyperparameters.momentum),
            trust_ratio_exponent=hyperparameters.trust_ratio_exponent,
        )
        if ratios is not None:
            ratios = tf.where(terms.is_sgd, ratios, 1.0)
        return LayerRates(rates, ratios)

    def update(
        self,
        grad: tf.Tensor,
        weight: tf.Tensor,
        slots: Moments,
        ctx: UpdateContext[HybridTerms],
    ) -> tuple[tf.Tensor, Moments]:
        beta1 = self.options.adabound_beta1
        beta2 = self.options.adabound_beta2
        is_sgd = ctx.terms.is_sgd
        gradient = ctx.unscale * ctx.add_scaled_decay(grad, weight)
        # m in phase 0, -u in phase 1
        gradient_factor = tf.where(is_sgd, -ctx.layer_learning_rates, 1.0 - beta1)
        m = ctx.terms.moment_factor * slots.first_moment
        m += ctx.layers.broadcast(gradient_factor) * gradient
        v = slots.second_moment
        v = tf.where(is_sgd, v, beta2 * v + (1.0 - beta2) * tf.square(gradient))
        rate = ctx.terms.step_size / (tf.sqrt(v) + self.options.adabound_eps)
        rate = tf.maximum(rate, ctx.hyperparameters.lower_bound)
        rate = tf.minimum(rate, ctx.terms.upper_bound)
        weight += tf.where(is_sgd, 1.0, -rate) * m
        return weight, Moments(m, v)


def _handover_scale(options: HybridOptions) -> float:
    """Returns the factor that, with P, turns the first moment into the velocity at T."""
    if options.handover == "reset":
        return 0.0
    if options.handover == "rescale":
        return 1.0 / (1.0 - options.adabound_beta1)
    return 1.0
