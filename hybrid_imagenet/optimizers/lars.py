"""LARS: a learning rate of its own for each layer, from the norms of its weights and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.optimizers.formulas import momentum_values
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.registry import LarsOptions
from hybrid_imagenet.optimizers.rule import TRUST_RATIOS, WEIGHTS, Before, Measured, Step
from hybrid_imagenet.optimizers.trust_ratio import clip_ratio, share_ratio, trust_ratio

_WEIGHT_SUMS = "weight_square_sums"


@dataclasses.dataclass(frozen=True)
class TrustRatio:
    """Computes the factor by which LARS scales a layer's learning rate.

    Attributes:
      variant: `you` scales by the ratio, `larc` by min(ratio / learning rate, 1), `none` not at
      all.
      eta: trust coefficient.
      eps: guard of the denominator.
      eps_rule: `add` or `floor`, see `optimizers.trust_ratio`.
    """

    variant: str = "you"
    eta: float = 0.001
    eps: float = 0.0
    eps_rule: str = "add"

    def before(self, optimizer: GroupedOptimizer, now: Before) -> dict[str, tf.Tensor]:
        """Returns the values that `layers` needs of a step before its gradients are there."""
        kernels = optimizer.kernel_indices()
        if self.variant == "none" or not kernels:
            return {}
        return {_WEIGHT_SUMS: now.weight_sums()}

    def layers(
        self,
        optimizer: GroupedOptimizer,
        now: Measured,
        factor: float | tf.Tensor = 1.0,
        share: tf.Tensor | None = None,
    ) -> dict[str, tf.Tensor]:
        """Returns `rates`, the learning rate of each variable times `factor`, and the ratios of
        kernels.

        Biases and normalization keep the global rate; where all do, it is a scalar. Norms and
        ratios are float32. With a `share` the ratios act in part only
        (`optimizers.trust_ratio.share_ratio`).
        """
        rate, kernels = now.hyper["learning_rate"], np.array(optimizer.kernel_indices(), np.int64)
        if _WEIGHT_SUMS not in now.before:
            return {"rates": factor * rate}
        ratio = trust_ratio(
            tf.sqrt(tf.gather(now.before[_WEIGHT_SUMS], kernels)),
            tf.sqrt(tf.gather(now.square_sums, kernels)) * now.unscale,
            eta=self.eta,
            decay=optimizer.decay,
            eps=self.eps,
            eps_rule=self.eps_rule,
            xp=tf,
        )
        if self.variant == "larc":
            ratio = clip_ratio(ratio, rate, xp=tf)
        if share is not None:
            ratio = share_ratio(ratio, share, xp=tf)
        place = np.full(len(optimizer.kinds), len(kernels), np.int64)
        place[kernels] = np.arange(len(kernels))
        return {
            "rates": factor * rate * tf.gather(tf.concat([ratio, [1.0]], 0), place),
            TRUST_RATIOS: ratio,
        }


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class LARS(GroupedOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1).

        ratio = eta |w| / (|grad| + beta |w|)           beta = weight_decay
        u = m u + lr ratio (grad + beta w);  w -= u     (the state holds -u)

    Biases and normalization parameters have ratio 1 and no decay (Jia et al. §3.2); so has a layer
    with a norm of 0, but for the decay. Variants: Nesterov and an added eps as in MLPerf's
    reference, the clip of LARC, and the eps of Mikami et al., which replaces smaller denominators.
    All of it is float32.
    """

    Options = LarsOptions
    slots = ("velocity",)

    def __init__(self, *values: Any, **options: Any):
        super().__init__(*values, **options)
        o = self.options
        self.ratio = TrustRatio(o.variant, o.eta, o.eps, o.eps_rule)
        self.scales_layers = o.variant != "none"

    def before(self, now: Before) -> dict[str, tf.Tensor]:
        return self.ratio.before(self, now)

    def layers(self, now: Measured) -> dict[str, tf.Tensor]:
        return self.ratio.layers(self, now)

    def rule(
        self, grad: tf.Tensor, values: Mapping[str, tf.Tensor], step: Step
    ) -> dict[str, tf.Tensor]:
        w, u = momentum_values(
            values[WEIGHTS],
            values["velocity"],
            grad,
            rate=step.spread(step.before["rates"]),
            momentum=step.hyper["momentum"],
            unscale=step.unscale,
            scaled_decay=step.scaled_decay,
            nesterov=self.options.nesterov,
        )
        return {WEIGHTS: w, "velocity": u}
