"""LAMB: Adam's direction, in each layer scaled to the norm of the layer's weights."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import tensorflow as tf

from hybrid_imagenet.optimizers.formulas import bias_correction
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.kinds import ParameterKind
from hybrid_imagenet.optimizers.registry import LambOptions
from hybrid_imagenet.optimizers.rule import WEIGHTS, Before, Step
from hybrid_imagenet.optimizers.trust_ratio import trust_ratio


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class LAMB(GroupedOptimizer):
    """Layer-wise adaptive moments (You et al., arXiv 1904.00962, algorithm 2), with phi the
    identity.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + lambda w        lambda = weight_decay
        w -= lr |w| / |r| r                                                  t: applied updates,
        from 1

    A layer moves by lr times the norm of its weights in every update: the learning rate is the
    relative step. Unlike that of the other optimizers the decay is not part of the gradient. Biases
    and normalization parameters take w -= lr r without decay, as in the authors' code; so does a
    layer whose |w| or |r| is 0.
    """

    Options = LambOptions
    slots = ("first_moment", "second_moment")

    def before(self, now: Before) -> dict[str, tf.Tensor]:
        """Computes the norms of the weights and the corrections for bias."""
        a = self.options
        return {
            "weight_norms": tf.sqrt(now.weight_sums()),
            "first": bias_correction(now.number, a.beta1),
            "second": bias_correction(now.number, a.beta2),
        }

    def rule(
        self, grad: tf.Tensor, values: Mapping[str, tf.Tensor], step: Step
    ) -> dict[str, tf.Tensor]:
        a, w, g = self.options, values[WEIGHTS], step.unscale * grad
        m = a.beta1 * values["first_moment"] + (1.0 - a.beta1) * g
        v = a.beta2 * values["second_moment"] + (1.0 - a.beta2) * tf.square(g)
        r = m / step.before["first"] / (tf.sqrt(v / step.before["second"]) + a.eps) + step.decay * w
        ratio = trust_ratio(step.spread(step.before["weight_norms"]), step.norms(r), eta=1.0, xp=tf)
        kernel = step.spread(tf.constant([kind is ParameterKind.KERNEL for kind in self.kinds]))
        rate = step.hyper["learning_rate"] * tf.where(kernel, ratio, 1.0)
        return {WEIGHTS: w - rate * r, "first_moment": m, "second_moment": v}
