"""Schedule-free SGD: an average of the iterates takes the place of a learning rate that falls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet.optimizers.average import WeightCopies
from hybrid_imagenet.optimizers.base import GroupedOptimizer
from hybrid_imagenet.optimizers.registry import ScheduleFreeOptions
from hybrid_imagenet.optimizers.rule import TOTALS, WEIGHTS, Before, Step


class _Average(WeightCopies):
    """x of `ScheduleFreeSGD`, which is known from the two points that it keeps."""

    def __init__(self, optimizer: ScheduleFreeSGD) -> None:
        """For an optimizer that has been built."""
        super().__init__()
        self._optimizer = optimizer
        self.build(optimizer._trainable_variables)

    @tf.function(autograph=False)
    def refresh(self) -> None:
        """x = (y - (1 - beta) z) / beta, and y before the first update."""
        beta, begun = self._optimizer.beta, self._optimizer.iterations.value > 0
        for y, z, x in zip(self._weights, self._optimizer.fast, self._averages, strict=True):
            x.value.assign(tf.where(begun, (y.value - (1.0 - beta) * z.value) / beta, y.value))


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class ScheduleFreeSGD(GroupedOptimizer):
    """Schedule-free SGD (Defazio et al., arXiv 2405.15682).

        y = (1 - beta) z + beta x                  the gradient g is taken at y, to which decay is coupled
        z' = z - lr (g + weight_decay y)
        x' = (1 - c) x + c z'                      c = w / sum of w up to now, w = (largest lr up to now)^2

    The weights that train are y, and z is the only state, as large as a velocity; x follows from both and is what is
    validated, kept and exported (`evaluated`). The learning rate is to stay constant after a warmup; it compares with
    lr / (1 - momentum) of SGD. The weights w are those of the authors' code: where the learning rate falls, the later
    steps count as much as those at its peak.
    """

    Options = ScheduleFreeOptions
    slots = ("fast",)

    def __init__(self, *values: Any, **options: Any):
        """Takes the fields of `Options`.

        Raises:
          ValueError: for a beta that is not above 0, where x could not be told from y and z.
        """
        super().__init__(*values, **options)
        self.beta = self.options.beta
        if not 0 < self.beta <= 1:
            raise ValueError(f"beta={self.beta} must lie above 0 and not above 1")

    def build(self, variables: Any) -> None:
        """Creates z, the sum of the weights w, and the largest learning rate."""
        if self.built:
            return
        super().build(variables)
        names = ("sum_of_weights", "largest_learning_rate")
        self.totals = [self.add_variable(shape=(), dtype="float32", name=name) for name in names]

    def before(self, now: Before) -> dict[str, Any]:
        """Computes 1 - c and beta c; c is 0 while every learning rate has been 0."""
        largest = tf.maximum(now.totals[1], now.hyper["learning_rate"])
        weight = tf.square(largest)
        total = now.totals[0] + weight
        c = tf.math.divide_no_nan(weight, total)
        return {"stays": 1.0 - c, "comes": self.beta * c, "first": now.number < 1.5, TOTALS: [total, largest]}

    def rule(self, grad: tf.Tensor, values: Mapping[str, tf.Tensor], step: Step) -> dict[str, tf.Tensor]:
        """One step; x is left out of it: beta x = y - (1 - beta) z."""
        y, rest = values[WEIGHTS], 1.0 - self.beta
        z = tf.where(step.before["first"], y, values["fast"])
        new = z - step.hyper["learning_rate"] * (step.unscale * grad + step.decay * y)
        average = step.before["stays"] * (y - rest * z) + step.before["comes"] * new
        return {WEIGHTS: rest * new + average, "fast": new}

    def evaluated(self) -> WeightCopies:
        """The average x."""
        return _Average(self)
