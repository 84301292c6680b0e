"""AdamW: Adam with weight decay that is not part of the gradient."""

from __future__ import annotations

from typing import NamedTuple

import keras
import tensorflow as tf

from hybrid_imagenet.optimizers.context import Moments, PrepareContext, UpdateContext
from hybrid_imagenet.optimizers.formulas import adam_step_size
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.registry import AdamWOptions


class AdamTerms(NamedTuple):
    """Terms of AdamW that do not depend on the gradients.

    Attributes:
      bias_correction: Correction of both moments for bias, sqrt(1 - b2^t) / (1 - b1^t).
    """

    bias_correction: tf.Tensor


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class AdamW(GroupedOptimizer):
    """Implements Adam with decoupled weight decay.

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        w -= lr (sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps) + weight_decay w)

    t counts applied updates from 1. These are the formulas and the defaults of
    `keras.optimizers.AdamW`, whose eps is added before the second moment is corrected for bias.
    Unlike in Keras, biases and normalization parameters do not decay unless `decay_all` is set.

    Example:
      optimizer = hi.DistributedOptimizer(hi.optimizers.AdamW(0.001, weight_decay=0.05))

    Args:
      learning_rate: Learning rate lr, unless a schedule sets it (default: 0.001).
      weight_decay: Part of the weights that each update subtracts, times the learning rate
        (default: 0.004).
      decay_all: Whether biases and normalization parameters decay too (default: False).
      global_clipnorm: Largest norm of the gradient of all weights together, averaged over ranks.
        Larger gradients are scaled down to it (default: None, no clipping).
      name: Name of the optimizer (default: "", as for --optimizer).
      beta1: Decay b1 of the first moment (default: 0.9).
      beta2: Decay b2 of the second moment; 0.95 follows gradients that change faster
        (default: 0.999).
      eps: Added to sqrt(v) (default: 1e-07).

    Raises:
      ValueError: If a value is outside its bounds, or the learning rate is not a number.

    Reference:
      Loshchilov, Hutter, arXiv 1711.05101, algorithm 2.
    """

    Options = AdamWOptions
    Slots = Moments

    def prepare(self, ctx: PrepareContext) -> AdamTerms:
        correction = adam_step_size(ctx.step, 1.0, self.options.beta1, self.options.beta2)
        return AdamTerms(correction)

    def update(
        self, grad: tf.Tensor, weight: tf.Tensor, slots: Moments, ctx: UpdateContext[AdamTerms]
    ) -> tuple[tf.Tensor, Moments]:
        beta1 = self.options.beta1
        beta2 = self.options.beta2
        gradient = ctx.unscale * grad
        m = beta1 * slots.first_moment + (1.0 - beta1) * gradient
        v = beta2 * slots.second_moment + (1.0 - beta2) * tf.square(gradient)
        direction = ctx.terms.bias_correction * m / (tf.sqrt(v) + self.options.eps)
        step = ctx.learning_rate * ctx.add_decay(direction, weight)
        return weight - step, Moments(m, v)
