"""LARS: each layer has its own learning rate, from the norms of its weights and gradients."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers.context import TRUST_RATIOS, UpdateContext
from hybrid_imagenet.optimizers.formulas import momentum_step
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer, State
from hybrid_imagenet.optimizers.registry import LarsOptions
from hybrid_imagenet.optimizers.trust_ratio import blend_ratio, clip_ratio, trust_ratio
from hybrid_imagenet.schedules import relative_step

_WEIGHT_SQUARE_SUMS = "weight_square_sums"


class LayerScaledOptimizer(GroupedOptimizer):
    """Base of the optimizers in which LARS scales the learning rate of each layer.

    No single trust coefficient suits every batch and learning rate: MLPerf's runs use 0.001, but
    with learning rates of 7 and more. If none is passed, `library.trust_coefficient` computes one
    when `fit` begins. With it LARS moves a layer as far in a step as in MLPerf's tuned runs: at the
    peak of the learning rate, by 0.105 sqrt(B / 3264) of the layer's norm, where B is the global
    batch. From then on the value is part of the configuration, as if it had been passed.
    """

    trust_coefficient_option: ClassVar[str] = "eta"
    """Name of the option that is the trust coefficient."""
    trust_ratio: TrustRatio

    @property
    def trust_coefficient(self) -> float | None:
        """The trust coefficient; None if it was not passed and `fit` has not set it yet."""
        return self.trust_ratio.eta

    @property
    def needs_trust_coefficient(self) -> bool:
        """Whether steps use a trust coefficient and there is none yet."""
        return self.scales_layers and self.trust_coefficient is None

    def set_trust_coefficient(self, value: float) -> None:
        """Sets the trust coefficient; call it before the first step is traced."""
        self.options = dataclasses.replace(self.options, **{self.trust_coefficient_option: value})
        self.trust_ratio = dataclasses.replace(self.trust_ratio, eta=value)

    def gradient_factor(self, momentum: Any) -> Any:
        """Returns the factor of the gradient in the velocity, see `relative_step`.

        Args:
          momentum: a number, or a tensor of float32 inside a step.
        """
        return relative_step.gradient_factor(None, momentum)

    def tuned_trust_coefficient(self, batch: float, learning_rate: float, momentum: float) -> float:
        """Returns the trust coefficient that gives LARS its tuned relative step.

        Args:
          batch: examples of all ranks in an update.
          learning_rate: at its peak, above 0.
          momentum: at the same time.
        """
        # LARC's clip bounds the learning rate of a layer by the ratio alone.
        rate = 1.0 if self.trust_ratio.variant == "larc" else learning_rate
        return relative_step.trust_coefficient(
            relative_step.tuned_step_law(batch), rate, momentum, self.gradient_factor(momentum)
        )

    def missing_trust_coefficient(self, reason: str, learning_rate: float, momentum: float) -> str:
        """Returns the error message for a step without a trust coefficient, with the value to pass.

        Args:
          reason: why `fit` cannot set it, as a sentence.
          learning_rate: at its peak.
          momentum: at the same time.
        """
        problem = f"The optimizer {self.name} has no trust coefficient. {reason}"
        option = self.trust_coefficient_option
        if learning_rate <= 0:
            return f"{problem} Raise the learning rate, or pass {option}."
        # The tuned relative step grows with the square root of the batch.
        of_one = self.tuned_trust_coefficient(1, learning_rate, momentum)
        return (
            f"{problem} Pass {option}={of_one:.3g} * batch**0.5, which suits a learning rate of"
            f" {learning_rate:g}; batch is the number of examples of all ranks in an update."
        )


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class LARS(LayerScaledOptimizer):
    """Implements LARS: SGD with a learning rate for each layer.

    For a gradient and weights w of a layer, with momentum m:

        ratio = eta |w| / (|gradient| + weight_decay |w|)
        v = m v - lr ratio (gradient + weight_decay w)
        w += v

    Biases and normalization parameters have ratio 1 and no decay (Jia et al. §3.2); a layer with a
    norm of 0 has ratio 1. Norms and ratios are computed in float32. The slot `velocity` holds v.

    Without `eta`, `fit` with `default_callbacks()` derives it from the global batch and the peak of
    the learning rate, so that a layer moves as far in a step as in MLPerf's tuned runs. Other loops
    need `eta`.

    Example:
      schedule = hi.schedules.polynomial(10.0, epochs=40, warmup_epochs=5)
      optimizer = hi.DistributedOptimizer(hi.optimizers.LARS(), schedule=schedule)

    Args:
      learning_rate: learning rate, unless a schedule sets it (default: 1.0).
      momentum: m, unless a schedule sets it (default: 0.9).
      weight_decay: coefficient of L2 regularization (default: 0.0).
      decay_all: whether biases and normalization parameters decay too (default: False).
      global_clipnorm: largest norm of the gradient of all weights together, averaged over ranks.
        Larger gradients are scaled down to it (default: None, no clipping).
      name: name of the optimizer (default: "", as for --optimizer).
      eta: trust coefficient; MLPerf uses 0.001 with learning rates of 7 and more (default: None,
        derived by `fit`).
      eps: guard of the ratio's denominator (default: 0.0).
      eps_rule: "add" adds eps to the denominator, as MLPerf does; "floor" replaces smaller
        denominators by it, as Mikami et al. do (default: "add").
      variant: "you" scales by the ratio; "larc" scales by min(ratio / lr, 1), so that a layer is
        never faster than lr; "none" is SGD (default: "you").
      nesterov: whether to use Nesterov's momentum, as MLPerf's reference writes it
        (default: False).
      decoupled_decay: whether each update subtracts weight_decay * learning rate / its peak times
        the weights, instead of adding decay to the gradient. The peak is that of a schedule of
        `hi.schedules`, or else `learning_rate` (default: False).

    Raises:
      ValueError: if a value is outside its bounds, or the learning rate is not a number.

    Reference:
      You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1.
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
      eta: trust coefficient; None if it is not known yet.
      eps: guard of the denominator.
      eps_rule: `add` or `floor`, see `optimizers.trust_ratio`.
    """

    variant: str = "you"
    eta: float | None = None
    eps: float = 0.0
    eps_rule: str = "add"

    def prepare(self, optimizer: LayerScaledOptimizer, ctx: UpdateContext) -> dict[str, tf.Tensor]:
        """Computes the square sums of the weights, which the gradients do not change."""
        if self.variant == "none" or not optimizer.kernel_indices():
            return {}
        return {_WEIGHT_SQUARE_SUMS: ctx.weight_square_sums()}

    def scale_layers(
        self,
        optimizer: LayerScaledOptimizer,
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

        Raises:
          UserError: without a trust coefficient.
        """
        learning_rate = ctx.learning_rate
        if _WEIGHT_SQUARE_SUMS not in ctx.prepared:
            return {"rates": factor * learning_rate}
        if self.eta is None:
            raise UserError(
                optimizer.missing_trust_coefficient(
                    "fit sets it with callbacks=hybrid_imagenet.callbacks.default_callbacks(),"
                    " but other loops do not.",
                    optimizer.learning_rate,
                    optimizer.hyperparameters["momentum"],
                )
            )
        kernels = np.array(optimizer.kernel_indices(), np.int64)
        gradient_norms = tf.sqrt(tf.gather(ctx.gradient_square_sums, kernels)) * ctx.unscale
        ratios = trust_ratio(
            tf.sqrt(tf.gather(ctx.prepared[_WEIGHT_SQUARE_SUMS], kernels)),
            gradient_norms,
            eta=self.eta,
            # A kernel that is excluded from weight decay has none in its denominator either.
            decay=optimizer.decay_coefficients(optimizer.decay)[kernels],
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
