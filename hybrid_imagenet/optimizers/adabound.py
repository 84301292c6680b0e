"""AdaBound throughout a run: the adaptive baseline of Lu et al., Fig. 3.1."""

from __future__ import annotations

from typing import NamedTuple

import keras
import tensorflow as tf

from hybrid_imagenet.optimizers.context import Moments, PrepareContext, UpdateContext
from hybrid_imagenet.optimizers.formulas import adam_step_size
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.registry import AdaBoundOptions
from hybrid_imagenet.schedules.step_bounds import adabound_bounds


class AdaBoundTerms(NamedTuple):
    """Terms of AdaBound that do not depend on the gradients.

    Attributes:
      step_size: Step size s of Adam.
      lower_bound: Lower bound of the rate of a weight.
      upper_bound: Upper bound of the rate of a weight.
    """

    step_size: tf.Tensor
    lower_bound: tf.Tensor
    upper_bound: tf.Tensor


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class AdaBound(GroupedOptimizer):
    """Implements AdaBound: Adam with bounds that close on a learning rate of SGD.

    With g = gradient + weight_decay w:

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        s = lr sqrt(1 - b2^t) / (1 - b1^t)
        w -= clip(s / (sqrt(v) + eps), F (1 - 1/(gamma t + 1)), F (1 + 1/(gamma t))) m

    t counts applied updates from 1. F = final_lr lr / peak follows the schedule, as in the authors'
    code. The peak is that of a schedule of `hi.schedules`, or else `learning_rate`.

    Example:
      optimizer = hi.DistributedOptimizer(hi.optimizers.AdaBound(0.001, final_lr=0.1))

    Args:
      learning_rate: Learning rate lr of Adam, unless a schedule sets it (default: 0.001).
      weight_decay: Coefficient of L2 regularization (default: 0.0).
      decay_all: Whether biases and normalization parameters decay too (default: False).
      global_clipnorm: Largest norm of the gradient of all weights together, averaged over ranks.
        Larger gradients are scaled down to it (default: None, no clipping).
      name: Name of the optimizer (default: "", as for --optimizer).
      final_lr: Learning rate of SGD at which the bounds close, at the peak of lr (default: 0.1).
      gamma: How fast the bounds close, per update (default: 0.001).
      beta1: Decay b1 of the first moment (default: 0.9).
      beta2: Decay b2 of the second moment (default: 0.999).
      eps: Added to sqrt(v) (default: 1e-08).

    Raises:
      ValueError: If a value is outside its bounds, or the learning rate is not a number.

    Reference:
      Luo et al., ICLR 2019, algorithm 2.
    """

    Options = AdaBoundOptions
    Slots = Moments

    @property
    def argument_of_peak(self) -> str:
        return "final_lr"

    def prepare(self, ctx: PrepareContext) -> AdaBoundTerms:
        options = self.options
        rate = ctx.learning_rate
        final_rate = rate * (options.final_lr / self.peak_learning_rate)
        lower, upper = adabound_bounds(ctx.step, final_rate, options.gamma)
        step_size = adam_step_size(ctx.step, rate, options.beta1, options.beta2)
        return AdaBoundTerms(step_size, lower, upper)

    def update(
        self, grad: tf.Tensor, weight: tf.Tensor, slots: Moments, ctx: UpdateContext[AdaBoundTerms]
    ) -> tuple[tf.Tensor, Moments]:
        beta1 = self.options.beta1
        beta2 = self.options.beta2
        gradient = ctx.add_decay(ctx.unscale * grad, weight)
        m = beta1 * slots.first_moment + (1.0 - beta1) * gradient
        v = beta2 * slots.second_moment + (1.0 - beta2) * tf.square(gradient)
        rate = ctx.terms.step_size / (tf.sqrt(v) + self.options.eps)
        upper = tf.maximum(ctx.terms.upper_bound, ctx.terms.lower_bound)
        bounded_rate = tf.minimum(tf.maximum(rate, ctx.terms.lower_bound), upper)
        return weight - bounded_rate * m, Moments(m, v)
