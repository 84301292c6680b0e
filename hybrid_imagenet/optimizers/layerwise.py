"""Learning rates of all layers at once, from norms (LARS)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hybrid_imagenet.numerics.trust_ratio import EPS_RULES, VARIANTS, EpsRule, Variant, clip_ratio, trust_ratio

if TYPE_CHECKING:
    from hybrid_imagenet.optimizers.base import GroupedOptimizer


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

        Norms and ratios are float32, a vector over all kernels.
        """
        variables = optimizer._trainable_variables
        rates: list[Any] = [factor * learning_rate] * len(variables)
        kernels = optimizer.kernel_indices()
        if self.variant == "none" or not kernels:
            return rates
        weight_norms = tf.sqrt(tf.stack([2.0 * tf.nn.l2_loss(variables[i].value) for i in kernels]))
        gradient_norms = tf.sqrt(tf.gather(square_sums, kernels)) * unscale
        ratio = trust_ratio(
            weight_norms,
            gradient_norms,
            eta=self.eta,
            decay=optimizer.decay,
            eps=self.eps,
            eps_rule=self.eps_rule,
            xp=tf,
        )
        if self.variant == "larc":
            ratio = clip_ratio(ratio, learning_rate, xp=tf)
        optimizer.trust_ratios.assign(ratio)
        for i, rate in zip(kernels, tf.unstack(factor * learning_rate * ratio), strict=True):
            rates[i] = rate
        return rates
