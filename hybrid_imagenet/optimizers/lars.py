"""LARS: each layer has its own learning rate, from the norms of its weights and gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers.context import (
    LayerRates,
    PrepareContext,
    UpdateContext,
    Velocity,
)
from hybrid_imagenet.optimizers.formulas import momentum_step
from hybrid_imagenet.optimizers.hyperparameters import StepHyperparameters
from hybrid_imagenet.optimizers.layer_scaled import LayerScaledOptimizer, LayerScaling
from hybrid_imagenet.optimizers.registry import LarsOptions


class LarsTerms(NamedTuple):
    """Terms of LARS that do not depend on the gradients.

    Attributes:
      weight_norms: L2 norm |w| of each variable, float32 [n]; None if no layer is scaled.
    """

    weight_norms: tf.Tensor | None


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class LARS(LayerScaledOptimizer):
    """Implements LARS: SGD with a learning rate for each layer.

    For a gradient and weights w of a layer, with momentum m:

        ratio = eta |w| / (|gradient| + weight_decay |w|)
        v = m v - lr ratio (gradient + weight_decay w)
        w += v

    Biases and normalization parameters have ratio 1 and no decay (Jia et al. §3.2); a layer with a
    norm of 0 has ratio 1. Norms and ratios are computed in float32. The slot `velocity` holds v.

    Without `trust_coefficient`, `fit` with `default_callbacks()` derives it from the global batch
    and the peak of the learning rate, so that a layer moves as far in a step as in MLPerf's tuned
    runs. Other loops need `trust_coefficient`.

    Example:
      schedule = hi.schedules.polynomial(10.0, epochs=40, warmup_epochs=5)
      optimizer = hi.DistributedOptimizer(hi.optimizers.LARS(), schedule=schedule)

    Args:
      learning_rate: Learning rate, unless a schedule sets it (default: 1.0).
      momentum: Momentum m, unless a schedule sets it (default: 0.9).
      weight_decay: Coefficient of L2 regularization (default: 0.0).
      decay_all: Whether biases and normalization parameters decay too (default: False).
      global_clipnorm: Largest norm of the gradient of all weights together, averaged over ranks.
        Larger gradients are scaled down to it (default: None, no clipping).
      name: Name of the optimizer (default: "", as for --optimizer).
      trust_coefficient: Coefficient eta; MLPerf uses 0.001 with learning rates of 7 and more
        (default: None, derived by `fit`).
      eps: Guard of the ratio's denominator (default: 0.0).
      eps_rule: "add" adds eps to the denominator, as MLPerf does; "floor" replaces smaller
        denominators by it, as Mikami et al. do (default: "add").
      variant: "you" scales by the ratio; "larc" scales by min(ratio / lr, 1), so that a layer is
        never faster than lr; "none" is SGD (default: "you").
      nesterov: Whether to use Nesterov's momentum, as MLPerf's reference writes it
        (default: False).
      decoupled_decay: Whether each update subtracts weight_decay * learning rate / its peak times
        the weights, instead of adding decay to the gradient. The peak is that of a schedule of
        `hi.schedules`, or else `learning_rate` (default: False).

    Raises:
      ValueError: If a value is outside its bounds, or the learning rate is not a number.

    Reference:
      You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1.
    """

    Options = LarsOptions
    Slots = Velocity

    @property
    def layer_scaling(self) -> LayerScaling:
        options = self.options
        return LayerScaling(
            options.variant, options.trust_coefficient, options.eps, options.eps_rule
        )

    def prepare(self, ctx: PrepareContext) -> LarsTerms:
        return LarsTerms(weight_norms(self, ctx))

    def scale_layers(
        self, gradient_norms: tf.Tensor, terms: LarsTerms, hyperparameters: StepHyperparameters
    ) -> LayerRates:
        return layer_rates(self, terms.weight_norms, gradient_norms, hyperparameters.learning_rate)

    def update(
        self,
        grad: tf.Tensor,
        weight: tf.Tensor,
        slots: Velocity,
        ctx: UpdateContext[LarsTerms],
    ) -> tuple[tf.Tensor, Velocity]:
        rate = ctx.layers.broadcast(ctx.layer_learning_rates)  # lr ratio
        return momentum_step(
            grad, weight, slots.velocity, ctx, rate=rate, nesterov=self.options.nesterov
        )


def trust_ratio(
    weight_norm: tf.Tensor,
    gradient_norm: tf.Tensor,
    *,
    trust_coefficient: float,
    decay: Any,
    eps: float = 0.0,
    eps_rule: str = "add",
) -> tf.Tensor:
    """Returns eta |w| / (|g| + decay |w|), and 1 where either norm is 0.

    Args:
      weight_norm: L2 norms |w| of the weights, one per layer.
      gradient_norm: L2 norms |g| of the gradients without weight decay, same shape.
      trust_coefficient: Coefficient eta.
      decay: Coefficient of weight decay; a number, or one per layer.
      eps: Guard of the denominator.
      eps_rule: "add" adds eps to the denominator (MLPerf's reference), "floor" replaces a
        denominator under eps by eps (the library of Mikami et al.).

    Reference:
      You et al., arXiv 1708.03888, equation 6.
    """
    denominator = gradient_norm + decay * weight_norm
    denominator = tf.maximum(denominator, eps) if eps_rule == "floor" else denominator + eps
    has_norms = (weight_norm > 0) & (gradient_norm > 0)
    # The inner `where` avoids a division by 0, whose result would not be used.
    denominator = tf.where(has_norms, denominator, 1.0)
    return tf.where(has_norms, trust_coefficient * weight_norm / denominator, 1.0)


def larc_ratio(ratio: tf.Tensor, learning_rate: tf.Tensor) -> tf.Tensor:
    """Returns min(ratio / learning_rate, 1): with LARC's clip no layer exceeds the global rate.

    A learning rate of 0 leaves the ratio at 1, which then has no effect.
    """
    positive_rate = tf.where(learning_rate > 0, learning_rate, 1.0)
    return tf.where(ratio < learning_rate, ratio / positive_rate, 1.0)


def weight_norms(optimizer: LayerScaledOptimizer, ctx: PrepareContext) -> tf.Tensor | None:
    """Returns the L2 norm of each variable, float32 [n]; None if LARS scales no layer."""
    if optimizer.scales_layers and optimizer.kernel_indices():
        return ctx.weight_norms()
    return None


def layer_rates(
    optimizer: LayerScaledOptimizer,
    weight_norms: tf.Tensor | None,
    gradient_norms: tf.Tensor,
    learning_rate: tf.Tensor,
    *,
    factor: float | tf.Tensor = 1.0,
    trust_ratio_exponent: tf.Tensor | None = None,
) -> LayerRates:
    """Computes factor * learning rate * ratio^s for each layer, for LARS and hybrid.

    Biases and normalization parameters have the ratio 1. Norms and ratios are float32.

    Args:
      optimizer: Optimizer of the layers.
      weight_norms: L2 norms of the weights [n]; None if no layer is scaled.
      gradient_norms: L2 norms of the gradients [n], without weight decay.
      learning_rate: Global learning rate.
      factor: Factor of all learning rates.
      trust_ratio_exponent: Exponent s of the ratio, from 0 (all layers have the global rate) to 1
        (LARS). None for 1. Steps between are even in the logarithm.

    Raises:
      UserError: Without a trust coefficient.
    """
    if weight_norms is None:
        return LayerRates(factor * learning_rate)
    scaling = optimizer.layer_scaling
    if scaling.trust_coefficient is None:
        raise UserError(
            optimizer.missing_trust_coefficient(
                "fit sets it with callbacks=hybrid_imagenet.callbacks.default_callbacks(), but"
                " other loops do not.",
                optimizer.learning_rate,
                optimizer.hyperparameters["momentum"],
            )
        )
    kernels = np.array(optimizer.kernel_indices(), np.int64)
    ratios = trust_ratio(
        tf.gather(weight_norms, kernels),
        tf.gather(gradient_norms, kernels),
        trust_coefficient=scaling.trust_coefficient,
        # A kernel that is excluded from weight decay has none in its denominator either.
        decay=optimizer.decay_coefficients(optimizer.coupled_decay_rate)[kernels],
        eps=scaling.eps,
        eps_rule=scaling.eps_rule,
    )
    if scaling.variant == "larc":
        ratios = larc_ratio(ratios, learning_rate)
    if trust_ratio_exponent is not None:
        has_ramp_ended = trust_ratio_exponent >= 1.0
        ratios = tf.where(has_ramp_ended, ratios, ratios**trust_ratio_exponent)
    all_ratios = _scatter(ratios, kernels, len(optimizer.kinds), default=1.0)
    return LayerRates(factor * learning_rate * all_ratios, ratios)


def _scatter(values: tf.Tensor, positions: np.ndarray, size: int, default: float) -> tf.Tensor:
    """Returns [size] with values at positions and the default elsewhere, by one gather.

    The ratio of every variable with a mask would take one kernel more on a GPU.
    """
    source = np.full(size, len(positions), np.int64)
    source[positions] = np.arange(len(positions))
    return tf.gather(tf.concat([values, [default]], 0), source)
