"""LARS: a learning rate of its own for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import keras
import tensorflow as tf

from hybrid_imagenet.numerics.trust_ratio import EpsRule, Variant
from hybrid_imagenet.optimizers.base import GroupedOptimizer
from hybrid_imagenet.optimizers.layerwise import TrustRatio
from hybrid_imagenet.optimizers.rule import WEIGHTS, Before, Step
from hybrid_imagenet.optimizers.updates import momentum_step, momentum_values


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class LARS(GroupedOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1).

        ratio = eta |w| / (|grad| + beta |w|)           beta = weight_decay
        u = m u + lr ratio (grad + beta w);  w -= u     (the state holds -u)

    Biases and normalization parameters have ratio 1 and no decay (J 3.2); so has a layer with a norm of 0, but for
    the decay. Variants: Nesterov and an added eps as in MLPerf's reference, the clip of LARC, and the eps of S, which
    replaces smaller denominators. All of it is float32.
    """

    slots = ("velocity",)

    def __init__(
        self,
        learning_rate: float = 1.0,
        momentum: float = 0.9,
        *,
        eta: Annotated[float, ">= 0"] = 0.001,
        eps: Annotated[float, ">= 0"] = 0.0,
        eps_rule: EpsRule = "add",
        variant: Variant = "you",
        nesterov: bool = False,
        weight_decay: float = 1e-4,
        decay_all: bool = False,
        name: str = "lars",
    ):
        """See `GroupedOptimizer` for the common arguments.

        Args:
          learning_rate: that of biases and normalization; the layers' is a multiple of it.
          momentum: see the base.
          eta: trust coefficient (Mikami et al. state 0.01, LARC 0.02).
          eps: guard of the ratio's denominator.
          eps_rule: add eps (MLPerf), or replace smaller denominators by it (Mikami et al.).
          variant: rates per layer; You et al., LARC's clip, or none.
          nesterov: Nesterov's momentum in MLPerf's form.
          weight_decay: see the base.
          decay_all: see the base.
          name: of the optimizer.
        """
        super().__init__(learning_rate, momentum=momentum, weight_decay=weight_decay, decay_all=decay_all, name=name)
        self.ratio = TrustRatio(variant, eta, eps, eps_rule)
        self.scales_layers = variant != "none"
        self.nesterov = nesterov

    def update(
        self, grads: list[tf.Tensor], unscale: tf.Tensor, square_sums: tf.Tensor, hyper: dict[str, tf.Tensor]
    ) -> None:
        """One step of LARS."""
        rates = self.ratio.rates(self, square_sums, unscale, hyper["learning_rate"])
        for i, (grad, w, u) in enumerate(zip(grads, self._trainable_variables, self.velocity, strict=True)):
            momentum_step(
                w,
                u,
                grad,
                rate=rates[i],
                momentum=hyper["momentum"],
                unscale=unscale,
                decay=self.decay_of(i),
                nesterov=self.nesterov,
            )

    def before(self, now: Before) -> dict[str, tf.Tensor]:
        """The norms of the weights."""
        return self.ratio.before(self, now)

    def rule(self, grad: tf.Tensor, values: Mapping[str, tf.Tensor], step: Step) -> dict[str, tf.Tensor]:
        """The same on values."""
        rates, log = self.ratio.vector(self, step)
        w, u = momentum_values(
            values[WEIGHTS],
            values["velocity"],
            grad,
            rate=step.spread(rates),
            momentum=step.hyper["momentum"],
            unscale=step.unscale,
            scaled_decay=step.scaled_decay,
            nesterov=self.nesterov,
        )
        return {WEIGHTS: w, "velocity": u, **log}

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return super().get_config() | {
            "eta": self.ratio.eta,
            "eps": self.ratio.eps,
            "eps_rule": self.ratio.eps_rule,
            "variant": self.ratio.variant,
            "nesterov": self.nesterov,
        }
