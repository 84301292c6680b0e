"""The hybrid method of Lu et al.: AdaBound with linear-scaling bounds as the warmup of SGD with
LARS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet.optimizers.formulas import adam_step_size
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.lars import TrustRatio
from hybrid_imagenet.optimizers.registry import HybridOptions
from hybrid_imagenet.optimizers.rule import TRUST_RATIOS, WEIGHTS, Before, Measured, Step


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class Hybrid(GroupedOptimizer):
    """AdaBound-bounded warmup, then linear-scaling SGD with LARS (Lu, Lu, Liang, §2.2.1).

    Phase 0, epochs 1 to T, with the bounds of `schedules.adabound_bounds.hybrid_bounds` in the
    hyperparameters:

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        s = alpha sqrt(1 - b2^t) / (1 - b1^t)        t: applied updates; s = alpha without bias
        correction w -= clip(s / (sqrt(v) + eps), lower, upper) m

    At T both bounds are P = lr N, so the last step is w -= P m: SGD on an averaged gradient.

    Phase 1, with the learning rate a of the schedule and the ratio of LARS for each layer:

        u = momentum u + c a ratio^s (g + weight_decay w);  w -= u

    with s the scalar `lars_share`: it may grow from 0, where each layer has the learning rate P of
    phase 0's end, to 1, where LARS alone sets it (`schedules.training_schedule.Schedule`).

    Both phases are one formula whose factors follow the phase, a scalar: a branch in the step would
    have the host wait for the GPU. `handover` says how the velocity u begins, since Lu et al. do
    not:

    continuous: u = P m, which is the last step of the warmup itself, and c = 1 - momentum. The new
      velocity averages as m did: the size of the update does not jump at T (momentum alone would
      raise it tenfold), and where LARS gives a layer another learning rate, the update moves to it
      over some 1 / (1 - momentum) steps.
    reset: u = 0 and c = 1, SGD with momentum as in Goyal et al.
    rescale: u = P m / (1 - b1) and c = 1: the velocity that SGD with momentum would have built up
    by then.

    m and u share one variable (it holds -u); a counter of the steps of phase 1 tells the device
    when to hand over, so that skipped steps and resumed runs need no special care. Weight decay
    acts in phase 1 only, unless `decay_in_warmup` is set.
    """

    Options = HybridOptions
    slots = ("first_moment", "second_moment")
    phases = 2  # `hyper["phase"]` says which one a step belongs to

    def __init__(self, *values: Any, **options: Any):
        super().__init__(*values, **options)
        o = self.options
        self.ratio = TrustRatio(o.lars_variant, o.lars_eta, o.lars_eps, o.lars_eps_rule)
        self.scales_layers = o.lars_variant != "none"

    def build(self, variables: Any) -> None:
        """Creates the moments, and the counter of the steps of phase 1."""
        if self.built:
            return
        super().build(variables)
        self._sgd_steps = self.add_variable(shape=(), dtype="int64", name="sgd_steps")

    def decays(self, hyper: Mapping[str, tf.Tensor]) -> Any:
        return tf.where(hyper["phase"] > 0.5, 1.0, float(self.options.decay_in_warmup))

    def counters(self) -> list[keras.Variable]:
        return [self._sgd_steps]

    def before(self, now: Before) -> dict[str, tf.Tensor]:
        """Computes the step size of phase 0 and its bound, the factor of the first moment, and
        norms.
        """
        a, momentum, later = self.options, now.hyper["momentum"], now.hyper["phase"] > 0.5
        adam = adam_step_size(now.number, a.adabound_lr, a.adabound_beta1, a.adabound_beta2)
        # The first step turns the first moment into -u on the way: P, where both bounds meet, joins
        # the factor.
        begin: float = {"continuous": 1.0, "reset": 0.0, "rescale": 1.0 / (1.0 - a.adabound_beta1)}[
            a.handover
        ]
        carry = tf.where(
            tf.equal(now.counters[0], 0), -begin * now.hyper["lower_bound"] * momentum, momentum
        )
        return {
            "later": later,
            "step_size": adam if a.bias_correction else tf.constant(a.adabound_lr, tf.float32),
            "upper": tf.maximum(now.hyper["lower_bound"], now.hyper["upper_bound"]),
            "carry": tf.where(later, carry, a.adabound_beta1),
            **self.ratio.before(self, now),
        }

    def layers(self, now: Measured) -> dict[str, tf.Tensor]:
        """Computes the layers' learning rates, with the sign of u; in phase 0 the gradient's weight
        in m, 1 - b1.
        """
        later, momentum = now.before["later"], now.hyper["momentum"]
        factor = 1.0 - momentum if self.options.handover == "continuous" else tf.constant(1.0)
        found = self.ratio.layers(self, now, factor, now.hyper["lars_share"])
        found["rates"] = tf.where(later, -found["rates"], 1.0 - self.options.adabound_beta1)
        if TRUST_RATIOS in found:
            found[TRUST_RATIOS] = tf.where(later, found[TRUST_RATIOS], 1.0)
        return found

    def rule(
        self, grad: tf.Tensor, values: Mapping[str, tf.Tensor], step: Step
    ) -> dict[str, tf.Tensor]:
        a, now = self.options, step.before
        w, m, v = values[WEIGHTS], values["first_moment"], values["second_moment"]
        g = step.unscale * (grad + step.scaled_decay * w)
        m = now["carry"] * m + step.spread(now["rates"]) * g
        v = tf.where(
            now["later"], v, a.adabound_beta2 * v + (1.0 - a.adabound_beta2) * tf.square(g)
        )
        size = tf.maximum(
            now["step_size"] / (tf.sqrt(v) + a.adabound_eps), step.hyper["lower_bound"]
        )
        w += tf.where(now["later"], 1.0, -tf.minimum(size, now["upper"])) * m
        return dict(zip((WEIGHTS, *self.slots), (w, m, v), strict=True))
