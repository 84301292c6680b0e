"""Trust coefficients of LARS that `fit` derives from the batch, if none is passed."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.schedules import mlperf, relative_step


@dataclasses.dataclass(frozen=True)
class LayerScaling:
    """How LARS scales the learning rate of each layer.

    Attributes:
      variant: "you" scales by the trust ratio, "larc" by min(ratio / learning rate, 1), "none" not
        at all.
      trust_coefficient: Trust coefficient eta; None if it is not known yet.
      eps: Guard of the denominator of the trust ratio.
      eps_rule: "add" adds eps to the denominator, "floor" replaces smaller denominators by it.
    """

    variant: str
    trust_coefficient: float | None
    eps: float
    eps_rule: str


class LayerScaledOptimizer(GroupedOptimizer):
    """Base of the optimizers in which LARS scales the learning rate of each layer.

    No single trust coefficient suits every batch and learning rate: MLPerf's runs use 0.001, but
    with learning rates of 7 and more. If none is passed, `trust_coefficient.py` computes one
    when `fit` begins. With it LARS moves a layer as far in a step as in MLPerf's tuned runs at the
    global batch (`schedules.mlperf.tuned_step`). From then on the value is part of the
    configuration, as if it had been passed.
    """

    def __init__(self, *values: Any, **options: Any):
        super().__init__(*values, **options)
        self.scales_layers = self.layer_scaling.variant != "none"

    @property
    @abc.abstractmethod
    def layer_scaling(self) -> LayerScaling:
        """The options that say how LARS scales layers."""

    @property
    def trust_coefficient(self) -> float | None:
        """The trust coefficient; None if it was not passed and `fit` has not set it yet."""
        return self.layer_scaling.trust_coefficient

    @property
    def needs_trust_coefficient(self) -> bool:
        """Whether steps use a trust coefficient and there is none yet."""
        return self.scales_layers and self.trust_coefficient is None

    def set_trust_coefficient(self, value: float) -> None:
        """Sets the trust coefficient; call it before the first step is traced."""
        self.options = dataclasses.replace(self.options, trust_coefficient=value)

    def tuned_trust_coefficient(self, batch: float, learning_rate: float, momentum: float) -> float:
        """Returns the trust coefficient that gives LARS its tuned relative step.

        The training program uses the same step (`schedules.mlperf.tuned_step`).

        Args:
          batch: Examples of all ranks in an update.
          learning_rate: Learning rate at its peak, above 0.
          momentum: Momentum at the same time.
        """
        # LARC's clip bounds the learning rate of a layer by the ratio alone.
        rate = 1.0 if self.layer_scaling.variant == "larc" else learning_rate
        return relative_step.trust_coefficient(
            mlperf.tuned_step(batch), rate, momentum, self.options.gradient_factor(momentum)
        )

    def missing_trust_coefficient(self, reason: str, learning_rate: float, momentum: float) -> str:
        """Returns the error message for a step without a trust coefficient, with the value to pass.

        Args:
          reason: Why `fit` cannot set it, as a sentence.
          learning_rate: Learning rate at its peak.
          momentum: Momentum at the same time.
        """
        problem = f"The optimizer {self.name} has no trust coefficient. {reason}"
        if learning_rate <= 0:
            return f"{problem} Raise the learning rate, or pass trust_coefficient."
        # Within a factor of 1.7, the tuned relative step grows with the square root of the batch.
        coefficient_at_batch_1 = self.tuned_trust_coefficient(1, learning_rate, momentum)
        return (
            f"{problem} Pass trust_coefficient={coefficient_at_batch_1:.3g} * batch**0.5, which"
            f" suits a learning rate of {learning_rate:g}; batch is the number of examples of all"
            " ranks in an update."
        )
