"""Updates each large variable in place and the small ones as one vector, as suits a CPU.

A CPU pays nothing for starting a kernel but is limited by memory bandwidth: copying all variables
into one vector would cost a fifth of a step of ResNet-50 on small images. The many small variables
are a vector here too, because each compiled program adds a few hundredths of a second to the first
step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hybrid_imagenet.optimizers.context import (
    LayerOperations,
    UpdateContext,
)
from hybrid_imagenet.optimizers.executor import (
    WEIGHTS,
    GradientScaling,
    Outcome,
    Prepared,
    StepScalars,
    UpdateExecutor,
    Values,
    keep_old_unless,
)
from hybrid_imagenet.optimizers.hyperparameters import StepHyperparameters
from hybrid_imagenet.optimizers.kinds import ParameterKind
from hybrid_imagenet.optimizers.layout import Layout, Packed

MAX_SMALL_ELEMENTS = 4096
"""Variables with at most this many elements are updated together as one vector."""


@dataclasses.dataclass(frozen=True)
class OneVariable:
    """`LayerOperations` of one variable, in a program that serves all variables of its shape.

    Attributes:
      position: Position of the variable, int32 scalar tensor.
      example: Position of the variable that the program was traced with, which has the same shape
        and kind.
    """

    position: tf.Tensor
    example: int

    def broadcast(self, vector: tf.Tensor) -> tf.Tensor:
        return vector if vector.shape.rank == 0 else tf.gather(vector, self.position)

    def norms(self, values: tf.Tensor) -> tf.Tensor:
        return tf.sqrt(tf.reduce_sum(tf.square(values)))

    def map(self, values: tf.Tensor, function: Callable[[int, tf.Tensor], tf.Tensor]) -> tf.Tensor:
        return function(self.example, values)


class PerVariableExecutor(UpdateExecutor):
    """Compiles one program per shape and kind of a large variable, and one for all small ones."""

    def _run(self, layout: Layout, reduced: Packed, scalars: StepScalars) -> Outcome:
        variables = self._variables()
        grads = layout.unpack_buckets(reduced)
        no_gradient = tf.zeros([0])
        grad_square_sums = square_sums(
            [grads.get(i, no_gradient) for i in range(len(layout.shapes))]
        )
        prepared = self._prepare(
            scalars,
            lambda: square_sums([v.value for v in variables[WEIGHTS]]),
            self._optimizer.decay_coefficients(self._optimizer.coupled_decay_rate),
        )
        outcome, scaling = self._decide(grad_square_sums, prepared, scalars)
        step = (prepared, scaling, scalars.hyperparameters, outcome.is_finite)

        small = [i for i in grads if math.prod(layout.shapes[i]) <= MAX_SMALL_ELEMENTS]
        for position in grads:
            if position in small:
                continue
            is_kernel = self._optimizer.kinds[position] is ParameterKind.KERNEL
            update_large = self._compiled(
                ("large", layout.shapes[position], is_kernel),
                functools.partial(self._update_large_variable, position),
            )
            values = {name: each[position].value for name, each in variables.items()}
            update_large(values, grads[position], tf.constant(position), *step)
        if small:
            small_layout = Layout(layout.shapes, small)
            old = {
                name: small_layout.pack([v.value for v in each]) for name, each in variables.items()
            }
            update_small = self._compiled(
                ("small",), functools.partial(self._update_small_variables, small_layout)
            )
            new = update_small(old, small_layout.pack(grads), *step)
            for name, rows in new.items():
                for position, value in small_layout.unpack(rows).items():
                    variables[name][position].value.assign(value, read_value=False)
        return outcome

    def _update_large_variable(
        self,
        example: int,
        variables: Mapping[str, tf.Variable],
        grad: tf.Tensor,
        position: tf.Tensor,
        prepared: Prepared,
        scaling: GradientScaling,
        hyperparameters: tf.Tensor,
        is_finite: tf.Tensor,
    ) -> None:
        """Updates one variable, its slots and its average in place, if the step is taken."""
        ctx = self._context(OneVariable(position, example), prepared, scaling, hyperparameters)

        def update() -> None:
            old = {name: variable.read_value() for name, variable in variables.items()}
            new = self._apply_rule(grad, old, ctx, prepared, scaling.clip_factor)
            for name, variable in variables.items():
                variable.assign(new[name], read_value=False)

        # A mask as in `packed` would take a third longer here.
        tf.cond(is_finite, update, lambda: None)

    def _update_small_variables(
        self,
        layout: Layout,
        old: Values,
        grad: tf.Tensor,
        prepared: Prepared,
        scaling: GradientScaling,
        hyperparameters: tf.Tensor,
        is_finite: tf.Tensor,
    ) -> Values:
        """Returns the new values of the variables of a layout as [rows, ROW_SIZE]."""
        ctx = self._context(layout, prepared, scaling, hyperparameters)
        new = self._apply_rule(grad, old, ctx, prepared, scaling.clip_factor)
        return keep_old_unless(is_finite, new, old)

    def _context(
        self,
        layers: LayerOperations,
        prepared: Prepared,
        scaling: GradientScaling,
        hyperparameters: tf.Tensor,
    ) -> UpdateContext[Any]:
        decay = None
        scaled_decay = None
        if prepared.scaled_decay is not None:
            rate = self._optimizer.coupled_decay_rate
            coefficients: np.ndarray = self._optimizer.decay_coefficients(rate)
            decay = layers.broadcast(tf.constant(coefficients))
            scaled_decay = layers.broadcast(prepared.scaled_decay)
        return UpdateContext(
            hyperparameters=StepHyperparameters.from_vector(hyperparameters),
            terms=prepared.terms,
            layer_learning_rates=scaling.layer_learning_rates,
            unscale=prepared.unscale,
            layers=layers,
            decay=decay,
            scaled_decay=scaled_decay,
        )


def square_sums(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of squares of each tensor, float32 [n]."""
    return 2.0 * tf.stack([tf.nn.l2_loss(value) for value in values])
