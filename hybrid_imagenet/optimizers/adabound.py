"""AdaBound throughout a run: the adaptive baseline of Lu et al., Fig. 3.1."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import tensorflow as tf

from hybrid_imagenet.optimizers.formulas import adam_step_size, bounded_adam_values
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.registry import AdaBoundOptions
from hybrid_imagenet.optimizers.rule import WEIGHTS, Before, Step
from hybrid_imagenet.schedules.adabound_bounds import adabound_bounds

_MOMENTS = ("first_moment", "second_moment")


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class AdaBound(GroupedOptimizer):
    """Adam whose step is clipped into bounds that close on SGD's learning rate (Luo et al., ICLR
    2019, algorithm 2).

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        s = lr sqrt(1 - b2^t) / (1 - b1^t)
        w -= clip(s / (sqrt(v) + eps), F (1 - 1/(gamma t + 1)), F (1 + 1/(gamma t))) m

    t counts applied updates from 1; F = final_lr lr / learning_rate follows the schedule, as in the
    authors' code.
    """

    Options = AdaBoundOptions
    slots = _MOMENTS

    def before(self, now: Before) -> dict[str, tf.Tensor]:
        a, rate = self.options, now.hyper["learning_rate"]
        lower, upper = adabound_bounds(now.number, rate * (a.final_lr / a.learning_rate), a.gamma)
        return {
            "step_size": adam_step_size(now.number, rate, a.beta1, a.beta2),
            "lower": lower,
            "upper": upper,
        }

    def rule(
        self, grad: tf.Tensor, values: Mapping[str, tf.Tensor], step: Step
    ) -> dict[str, tf.Tensor]:
        new = bounded_adam_values(
            values[WEIGHTS],
            values["first_moment"],
            values["second_moment"],
            grad,
            betas=(self.options.beta1, self.options.beta2),
            eps=self.options.eps,
            unscale=step.unscale,
            decay=step.decay,
            **step.before,
        )
        return dict(zip((WEIGHTS, *_MOMENTS), new, strict=True))
