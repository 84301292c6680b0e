"""Learning rates of all layers at once, from norms (LARS)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hybrid_imagenet.numerics.trust_ratio import EPS_RULES, VARIANTS, EpsRule, Variant, clip_ratio, trust_ratio
from hybrid_imagenet.optimizers.rule import TRUST_RATIOS, Before, Step

if TYPE_CHECKING:
    from hybrid_imagenet.optimizers.base import GroupedOptimizer

_WEIGHT_SUMS = "kernel_square_sums"


@dataclasses.dataclass(frozen=True)
class TrustRatio:
    """How LARS scales a layer.

    Attributes:
      variant: `you` scales by the ratio, `larc` by min(ratio / learning rate, 1), `none` not at all.
      eta: trust coefficient.
      eps: guard of the denominator.
      eps_rule: `add` or `floor`, see `numerics.trust_ratio`.
    """

    variant: Variant = "you"
    eta: float = 0.001
    eps: float = 0.0
    eps_rule: EpsRule = "add"

    def __post_init__(self) -> None:
        """Raises ValueError for a variant or rule that does not exist."""
        if self.variant not in VARIANTS or self.eps_rule not in EPS_RULES:
            raise ValueError(f"no such LARS variant or eps rule: {self.variant}, {self.eps_rule}")

    def rates(
        self,
        optimizer: GroupedOptimizer,
        square_sums: tf.Tensor,
        unscale: tf.Tensor,
        learning_rate: tf.Tensor,
        factor: float | tf.Tensor = 1.0,
    ) -> list[tf.Tensor]:
        """The learning rate of each variable times `factor`; biases and normalization keep the global rate.

        Norms and ratios are float32, a vector over all kernels. The ratios are kept for the log.
        """
        variables = optimizer._trainable_variables
        rates: list[Any] = [factor * learning_rate] * len(variables)
        kernels = optimizer.kernel_indices()
        if self.variant == "none" or not kernels:
            return rates
        weight_sums = tf.stack([2.0 * tf.nn.l2_loss(variables[i].value) for i in kernels])
        ratio = self._ratios(optimizer, weight_sums, tf.gather(square_sums, kernels), unscale, learning_rate)
        optimizer.trust_ratios.assign(ratio)
        for i, rate in zip(kernels, tf.unstack(factor * learning_rate * ratio), strict=True):
            rates[i] = rate
        return rates

    def before(self, optimizer: GroupedOptimizer, now: Before) -> dict[str, tf.Tensor]:
        """What `vector` needs of a step before its gradients are there."""
        kernels = optimizer.kernel_indices()
        if self.variant == "none" or not kernels:
            return {}
        return {_WEIGHT_SUMS: tf.gather(now.weight_sums(), kernels)}

    def vector(
        self, optimizer: GroupedOptimizer, step: Step, factor: float | tf.Tensor = 1.0
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """The same as one vector [n], or a scalar where all have one rate, and the ratios under `TRUST_RATIOS`."""
        rate, kernels = step.hyper["learning_rate"], optimizer.kernel_indices()
        if _WEIGHT_SUMS not in step.before:
            return factor * rate, {}
        gradient_sums = tf.gather(step.square_sums, kernels)
        ratio = self._ratios(optimizer, step.before[_WEIGHT_SUMS], gradient_sums, step.unscale, rate)
        place = np.full(len(optimizer.kinds), len(kernels), np.int32)
        place[kernels] = np.arange(len(kernels))
        return factor * rate * tf.gather(tf.concat([ratio, [1.0]], 0), place), {TRUST_RATIOS: ratio}

    def _ratios(
        self,
        optimizer: GroupedOptimizer,
        weight_sums: tf.Tensor,
        gradient_sums: tf.Tensor,
        unscale: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tf.Tensor:
        """The ratios of kernels with these sums of squares."""
        ratio = trust_ratio(
            tf.sqrt(weight_sums),
            tf.sqrt(gradient_sums) * unscale,
            eta=self.eta,
            decay=optimizer.decay,
            eps=self.eps,
            eps_rule=self.eps_rule,
            xp=tf,
        )
        return clip_ratio(ratio, learning_rate, xp=tf) if self.variant == "larc" else ratio
