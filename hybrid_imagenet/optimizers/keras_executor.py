"""Lets an optimizer of Keras update the variables from reduced gradients."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from hybrid_imagenet import xla
from hybrid_imagenet.optimizers.layout import Layout, Packed
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.optimizers.per_variable import square_sums


class KerasExecutor:
    """Calls `apply` of a Keras optimizer, unless the gradients are not finite."""

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        loss_scale: LossScale,
        variables: Sequence[keras.Variable],
    ) -> None:
        """Stores the optimizer, its loss scale and the variables.

        Args:
          optimizer: Optimizer of Keras, which has a rule for each variable.
          loss_scale: Factor of the gradients.
          variables: Trainable variables, in the order of the gradients.
        """
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._variables = variables

    def apply(self, reduced: Packed) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes one step inside a graph, from the means over ranks of scaled gradients.

        Args:
          reduced: The gradients.

        Returns:
          The square sums of the scaled gradients, float32 [n], and the norm of all unscaled ones.
        """
        layout = Layout([v.shape for v in self._variables], reduced.order)
        by_position = layout.unpack_buckets(reduced)
        grads = [by_position.get(i, tf.zeros(v.shape)) for i, v in enumerate(self._variables)]
        gradient_square_sums = square_sums(grads)
        total = tf.reduce_sum(gradient_square_sums)
        is_finite = tf.math.is_finite(total)
        unscale = 1.0 / self._loss_scale.scale.value
        if xla.has_gpu():
            self._apply_masked(grads, unscale, is_finite)
        else:
            self._apply_in_branch(grads, unscale, is_finite)
        self._loss_scale.update(is_finite)
        return gradient_square_sums, tf.sqrt(total) * unscale

    def _apply_in_branch(
        self, grads: Sequence[tf.Tensor], unscale: tf.Tensor, is_finite: tf.Tensor
    ) -> None:
        def update() -> tf.Tensor:
            self._optimizer.apply([grad * unscale for grad in grads], self._variables)
            return tf.constant(True)

        tf.cond(is_finite, update, lambda: tf.constant(False))

    def _apply_masked(
        self, grads: Sequence[tf.Tensor], unscale: tf.Tensor, is_finite: tf.Tensor
    ) -> None:
        """Updates, then puts all values back if the gradients are not finite.

        A branch would make the host wait for the decision of the GPU.
        """
        state = [v.value for v in (*self._variables, *self._optimizer.variables)]

        def update(*values: tf.Tensor) -> None:
            *gradients, factor, taken = values
            old_values = [variable.read_value() for variable in state]
            self._optimizer.apply([grad * factor for grad in gradients], self._variables)
            for variable, old in zip(state, old_values, strict=True):
                variable.assign(tf.where(taken, variable, old))

        xla.compile_on_gpu(update)(*grads, unscale, is_finite)
