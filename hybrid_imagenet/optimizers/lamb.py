"""LAMB: Adam's direction, in each layer scaled to the norm of the layer's weights."""

from __future__ import annotations

from typing import NamedTuple

import keras
import tensorflow as tf

from hybrid_imagenet.optimizers.context import Moments, PrepareContext, UpdateContext
from hybrid_imagenet.optimizers.formulas import bias_correction
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.kinds import ParameterKind
from hybrid_imagenet.optimizers.registry import LambOptions


class LambTerms(NamedTuple):
    """Terms of LAMB that do not depend on the gradients.

    Attributes:
      weight_norms: L2 norm |w| of each variable, float32 [n].
      first_correction: Correction of the first moment for bias, 1 - b1^t.
      second_correction: Correction of the second moment for bias, 1 - b2^t.
    """

    weight_norms: tf.Tensor
    first_correction: tf.Tensor
    second_correction: tf.Tensor


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class LAMB(GroupedOptimizer):
    """Implements LAMB: Adam's direction, scaled to the norm of each layer.

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w
        w -= lr |w| / |r| r

    t counts applied updates from 1. A layer moves by lr times the norm of its weights in every
    update, so the learning rate is the relative step. Weight decay is not part of the gradient.
    Biases and normalization parameters take w -= lr r without decay, as in the authors' code; so
    does a layer whose |w| or |r| is 0. The function phi of the paper is the identity.

    You et al. report 76.3 % top-1 for ResNet-50 at a batch of 32,768, with a learning rate that
    grows with the square root of the batch.

    Example:
      schedule = hi.schedules.polynomial(0.01, epochs=90, power=1, warmup_epochs=5)
      optimizer = hi.DistributedOptimizer(hi.optimizers.LAMB(), schedule=schedule)

    Args:
      learning_rate: Learning rate lr: the relative step of each layer, and the rate of biases and
        normalization parameters, unless a schedule sets it (default: 0.01).
      weight_decay: Factor of the weights that is added to Adam's step, before a layer's step is
        scaled (default: 0.0).
      decay_all: Whether biases and normalization parameters decay too (default: False).
      global_clipnorm: Largest norm of the gradient of all weights together, averaged over ranks.
        Larger gradients are scaled down to it (default: None, no clipping).
      name: Name of the optimizer (default: "", as for --optimizer).
      beta1: Decay b1 of the first moment (default: 0.9).
      beta2: Decay b2 of the second moment (default: 0.999).
      eps: Added to the root of the second moment (default: 1e-06).

    Raises:
      ValueError: If a value is outside its bounds, or the learning rate is not a number.

    Reference:
      You et al., arXiv 1904.00962, algorithm 2.
    """

    Options = LambOptions
    Slots = Moments

    def prepare(self, ctx: PrepareContext) -> LambTerms:
        return LambTerms(
            ctx.weight_norms(),
            bias_correction(ctx.step, self.options.beta1),
            bias_correction(ctx.step, self.options.beta2),
        )

    def update(
        self, grad: tf.Tensor, weight: tf.Tensor, slots: Moments, ctx: UpdateContext[LambTerms]
    ) -> tuple[tf.Tensor, Moments]:
        beta1 = self.options.beta1
        beta2 = self.options.beta2
        gradient = ctx.unscale * grad
        m = beta1 * slots.first_moment + (1.0 - beta1) * gradient
        v = beta2 * slots.second_moment + (1.0 - beta2) * tf.square(gradient)
        corrected_m = m / ctx.terms.first_correction
        corrected_v = v / ctx.terms.second_correction
        direction = ctx.add_decay(corrected_m / (tf.sqrt(corrected_v) + self.options.eps), weight)

        weight_norm = ctx.layers.broadcast(ctx.terms.weight_norms)
        direction_norm = ctx.layers.norms(direction)
        has_norms = (weight_norm > 0) & (direction_norm > 0)
        # The inner `where` avoids a division by 0, whose result would not be used.
        ratio = tf.where(has_norms, weight_norm / tf.where(has_norms, direction_norm, 1.0), 1.0)
        is_kernel = tf.constant([kind is ParameterKind.KERNEL for kind in self.kinds])
        rate = ctx.learning_rate * tf.where(ctx.layers.broadcast(is_kernel), ratio, 1.0)
        return weight - rate * direction, Moments(m, v)
