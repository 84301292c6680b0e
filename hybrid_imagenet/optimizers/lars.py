"""LARS: each layer has its own learning rate, from the norms of its weights and gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.optimizers.context import TRUST_RATIOS, UpdateContext
from hybrid_imagenet.optimizers.formulas import momentum_step
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer, State
from hybrid_imagenet.optimizers.registry import LarsOptions
from hybrid_imagenet.optimizers.trust_ratio import blend_ratio, clip_ratio, trust_ratio

_WEIGHT_SQUARE_SUMS = "weight_square_sums"


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class LARS(GroupedOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1).

        ratio = eta |w| / (|grad| + weight_decay |w|)
        u = m u + lr ratio (grad + weight_decay w)
        w -= u

    The slot `velocity` holds -u. Biases and normalization parameters have ratio 1 and no decay (Jia
    et al. §3.2); a layer with a norm of 0 has ratio 1. Variants: Nesterov and an added eps as in
    MLPerf's reference, the clip of LARC, and the eps of Mikami et al., which replaces smaller
    denominators. All of it is float32.
    """

    Options = LarsOptions
    slots = ("velocity",)

    def __init__(self, *values: Any, **options: Any):
        super().__init__(*values, **options)
        self.trust_ratio = TrustRatio(
            variant=self.options.variant,
            eta=self.options.eta,
            eps=self.options.eps,
            eps_rule=self.options.eps_rule,
        )
        self.scales_layers = self.options.variant != "none"

    def prepare(self, ctx: UpdateContext) -> dict[str, tf.Tensor]:
        return self.trust_ratio.prepare(self, ctx)

    def scale_layers(self, ctx: UpdateContext) -> dict[str, tf.Tensor]:
        return self.trust_ratio.scale_layers(self, ctx)

    def update(
        self, grad: tf.Tensor, weight: tf.Tensor, state: State, ctx: UpdateContext
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        rate = ctx.layers.broadcast(ctx.prepared["rates"])  # lr ratio
        return momentum_step(
            grad, weight, state["velocity"], ctx, rate=rate, nesterov=self.options.nesterov
        )


@dataclasses.dataclass(frozen=True)
class TrustRatio:
    """Computes the learning rate of each layer, for LARS and for the second phase of hybrid.

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

    def prepare(self, optimizer: GroupedOptimizer, ctx: UpdateContext) -> dict[str, tf.Tensor]:
        """Computes the square sums of the weights, which the gradients do not change."""
        if self.variant == "none" or not optimizer.kernel_indices():
            return {}
        return {_WEIGHT_SQUARE_SUMS: ctx.weight_square_sums()}

    def scale_layers(
        self,
        optimizer: GroupedOptimizer,
        ctx: UpdateContext,
        factor: float | tf.Tensor = 1.0,
        blend: tf.Tensor | None = None,
    ) -> dict[str, tf.Tensor]:
        """Computes `rates`, the learning rate of each variable, and the ratios of the kernels.

        Biases and normalization parameters keep the global rate. If all variables do, `rates` is a
        scalar. Norms and ratios are float32.

        Args:
          optimizer: whose variables are scaled.
          ctx: of this step.
          factor: multiplies all rates.
          blend: how much of the ratio acts, from 0 to 1, see `trust_ratio.blend_ratio`; by default
            all of it.
        """
        learning_rate = ctx.learning_rate
        if _WEIGHT_SQUARE_SUMS not in ctx.prepared:
            return {"rates": factor * learning_rate}
        kernels = np.array(optimizer.kernel_indices(), np.int64)
        gradient_norms = tf.sqrt(tf.gather(ctx.gradient_square_sums, kernels)) * ctx.unscale
        ratios = trust_ratio(
            tf.sqrt(tf.gather(ctx.prepared[_WEIGHT_SQUARE_SUMS], kernels)),
            gradient_norms,
            eta=self.eta,
            decay=optimizer.decay,
            eps=self.eps,
            eps_rule=self.eps_rule,
            xp=tf,
        )
        if self.variant == "larc":
            ratios = clip_ratio(ratios, learning_rate, xp=tf)
        if blend is not None:
            ratios = blend_ratio(ratios, blend, xp=tf)
        all_ratios = _scatter(ratios, kernels, len(optimizer.kinds), default=1.0)
        return {"rates": factor * learning_rate * all_ratios, TRUST_RATIOS: ratios}


def _scatter(values: tf.Tensor, positions: np.ndarray, size: int, default: float) -> tf.Tensor:
    """Returns [size] with values at positions and the default elsewhere, by one gather."""
    source = np.full(size, len(positions), np.int64)
    source[positions] = np.arange(len(positions))
    return tf.gather(tf.concat([values, [default]], 0), source)
