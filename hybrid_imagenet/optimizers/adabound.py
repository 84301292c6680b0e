"""AdaBound and AMSBound throughout a run: the adaptive baseline of Lu et al., Fig. 3.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import keras
import tensorflow as tf

from hybrid_imagenet.numerics.bounds import adabound_bounds
from hybrid_imagenet.optimizers.base import GroupedOptimizer
from hybrid_imagenet.optimizers.formulas import BoundedAdam, adam_step_size
from hybrid_imagenet.optimizers.rule import WEIGHTS, Before, Step

_MOMENTS = ("first_moment", "second_moment", "largest_second_moment")


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class AdaBound(GroupedOptimizer):
    """Adam whose step is clipped into bounds that close in on the rate of SGD (Luo et al., ICLR 2019, algorithm 2).

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        s = lr sqrt(1 - b2^t) / (1 - b1^t)
        w -= clip(s / (sqrt(v) + eps), F (1 - 1/(gamma t + 1)), F (1 + 1/(gamma t))) m

    t counts applied updates from 1; F = final_lr lr / learning_rate follows the schedule, as in the authors' code.
    With `amsbound` the running maximum of v takes its place.
    """

    slots: tuple[str, ...] = _MOMENTS[:2]

    def __init__(
        self,
        learning_rate: Annotated[float, "> 0"] = 1e-3,
        *,
        final_lr: float = 0.1,
        gamma: Annotated[float, "> 0"] = 1e-3,
        beta1: Annotated[float, "0 to 0.999999"] = 0.9,
        beta2: Annotated[float, "0 to 0.999999"] = 0.999,
        eps: Annotated[float, ">= 0"] = 1e-8,
        amsbound: bool = False,
        weight_decay: float = 0.0,
        decay_all: bool = False,
        name: str = "adabound",
    ):
        """See `GroupedOptimizer` for the common arguments.

        Args:
          learning_rate: learning rate alpha of Adam inside AdaBound.
          final_lr: the rate of SGD, at which the bounds close.
          gamma: how fast the bounds close, per step.
          beta1: decay of the first moment.
          beta2: decay of the second moment.
          eps: added to sqrt(v).
          amsbound: keep the largest second moment.
          weight_decay: see the base.
          decay_all: see the base.
          name: of the optimizer.

        Raises:
          ValueError: for a learning rate that is not positive, since the final rate is scaled by it.
        """
        if learning_rate <= 0:
            raise ValueError(f"learning_rate={learning_rate} must be positive")
        super().__init__(learning_rate, momentum=beta1, weight_decay=weight_decay, decay_all=decay_all, name=name)
        self.arguments: dict[str, Any] = {
            "final_lr": final_lr,
            "gamma": gamma,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "amsbound": amsbound,
        }
        self._rule = BoundedAdam(beta1, beta2, eps)
        if amsbound:
            self.slots = _MOMENTS

    def before(self, now: Before) -> dict[str, tf.Tensor]:
        """Computes the step size and its bounds."""
        limits = self._step_and_bounds(now.number, now.hyper["learning_rate"])
        return dict(zip(("step_size", "lower", "upper"), limits, strict=True))

    def rule(self, grad: tf.Tensor, values: Mapping[str, tf.Tensor], step: Step) -> dict[str, tf.Tensor]:
        """One step."""
        new = self._rule.values(
            values[WEIGHTS],
            values["first_moment"],
            values["second_moment"],
            values.get("largest_second_moment"),
            grad,
            unscale=step.unscale,
            decay=step.decay,
            **step.before,
        )
        return {name: value for name, value in zip((WEIGHTS, *_MOMENTS), new, strict=True) if value is not None}

    def _step_and_bounds(self, number: tf.Tensor, rate: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        a = self.arguments
        final = rate * (a["final_lr"] / self._config["learning_rate"])
        return adam_step_size(number, rate, a["beta1"], a["beta2"]), *adabound_bounds(number, final, a["gamma"])

    def get_config(self) -> dict[str, Any]:
        config = super().get_config() | self.arguments
        config.pop("momentum")
        return config
