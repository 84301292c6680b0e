"""Stochastic gradient descent with momentum: the baseline of Goyal et al., Lu et al. and the HAL
benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet.optimizers.formulas import classical_values, momentum_values
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.optimizers.registry import SgdOptions
from hybrid_imagenet.optimizers.rule import WEIGHTS, Step


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class SGD(GroupedOptimizer):
    """SGD with momentum and coupled L2 decay, g = grad + weight_decay w.

    Without Nesterov (Goyal et al., equation 9):  u = m u + g;  w -= lr u.
    With Nesterov (MLPerf reference):  v = m v - lr g;  w += m v - lr g.
    """

    Options = SgdOptions
    slots = ("velocity",)

    def rule(
        self, grad: tf.Tensor, values: Mapping[str, tf.Tensor], step: Step
    ) -> dict[str, tf.Tensor]:
        common: dict[str, Any] = {
            "rate": step.hyper["learning_rate"],
            "momentum": step.hyper["momentum"],
            "unscale": step.unscale,
        }
        w, u = values[WEIGHTS], values["velocity"]
        if self.options.nesterov:
            w, u = momentum_values(
                w, u, grad, scaled_decay=step.scaled_decay, nesterov=True, **common
            )
        else:
            w, u = classical_values(w, u, grad, decay=step.decay, **common)
        return {WEIGHTS: w, "velocity": u}
