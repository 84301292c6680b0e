"""LAMB: Adam's direction, in each layer scaled to the norm of the layer's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import keras
import tensorflow as tf

from hybrid_imagenet.numerics.trust_ratio import trust_ratio
from hybrid_imagenet.optimizers.base import GroupedOptimizer
from hybrid_imagenet.optimizers.formulas import bias_correction
from hybrid_imagenet.optimizers.kinds import ParameterKind
from hybrid_imagenet.optimizers.rule import WEIGHTS, Before, Step


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class LAMB(GroupedOptimizer):
    """Layer-wise adaptive moments (You et al., arXiv 1904.00962, algorithm 2), with phi the identity.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + lambda w        lambda = weight_decay
        w -= lr |w| / |r| r                                                  t: applied updates, from 1

    A layer moves by lr times the norm of its weights in every update: the learning rate is the relative step. Unlike
    that of the other optimizers the decay is not part of the gradient. Biases and normalization parameters take
    w -= lr r without decay, as in the authors' code; so does a layer whose |w| or |r| is 0.
    """

    slots = ("first_moment", "second_moment")

    def __init__(
        self,
        learning_rate: float = 0.01,
        *,
        beta1: Annotated[float, "0 to 0.999999"] = 0.9,
        beta2: Annotated[float, "0 to 0.999999"] = 0.999,
        eps: Annotated[float, "> 0"] = 1e-6,
        bias_correction: bool = True,
        weight_decay: float = 0.0,
        decay_all: bool = False,
        name: str = "lamb",
    ):
        """See `GroupedOptimizer` for the common arguments.

        Args:
          learning_rate: the relative step of each layer; of biases and normalization, the rate of Adam.
          beta1: decay of the first moment.
          beta2: decay of the second moment.
          eps: added to sqrt(v).
          bias_correction: divide the moments as shown; without it a warmup does the same (You et al., appendix).
          weight_decay: lambda.
          decay_all: see the base.
          name: of the optimizer.
        """
        super().__init__(learning_rate, momentum=beta1, weight_decay=weight_decay, decay_all=decay_all, name=name)
        self.arguments: dict[str, Any] = {
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "bias_correction": bias_correction,
        }

    def before(self, now: Before) -> dict[str, tf.Tensor]:
        """Computes the norms of the weights and the corrections for bias."""
        a, one = self.arguments, tf.constant(1.0)
        corrected = a["bias_correction"]
        return {
            "weight_norms": tf.sqrt(now.weight_sums()),
            "first": bias_correction(now.number, a["beta1"]) if corrected else one,
            "second": bias_correction(now.number, a["beta2"]) if corrected else one,
        }

    def rule(self, grad: tf.Tensor, values: Mapping[str, tf.Tensor], step: Step) -> dict[str, tf.Tensor]:
        """One step."""
        a, w, g = self.arguments, values[WEIGHTS], step.unscale * grad
        m = a["beta1"] * values["first_moment"] + (1.0 - a["beta1"]) * g
        v = a["beta2"] * values["second_moment"] + (1.0 - a["beta2"]) * tf.square(g)
        r = m / step.before["first"] / (tf.sqrt(v / step.before["second"]) + a["eps"]) + step.decay * w
        ratio = trust_ratio(step.spread(step.before["weight_norms"]), step.norms(r), eta=1.0, xp=tf)
        kernel = step.spread(tf.constant([kind is ParameterKind.KERNEL for kind in self.kinds]))
        rate = step.hyper["learning_rate"] * tf.where(kernel, ratio, 1.0)
        return {WEIGHTS: w - rate * r, "first_moment": m, "second_moment": v}

    def get_config(self) -> dict[str, Any]:
        config = super().get_config() | self.arguments
        config.pop("momentum")
        return config
